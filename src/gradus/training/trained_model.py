"""Trained model: what a run learned, put to use: its model built anew from the recipe, and data as it saw them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradus.checkpoint.base import base_of
from gradus.checkpoint.state import restore_model
from gradus.checkpoint.store import CheckpointStore
from gradus.checkpoint.tensor_file import StoredTensor
from gradus.record.directory import RunDirectory
from gradus.record.metrics import best_evaluation, evaluations, read_metrics
from gradus.record.summary import evaluate_block
from gradus.schema.errors import InputError, unknown_name
from gradus.schema.plan import Plan
from gradus.schema.recipe import OWN, Recipe
from gradus.training.building import build_model, finished_model, open_data
from gradus.training.compiled_in_place import compiled_in_place

WEIGHTS = ("model", "ema")
SPLITS = ("train", "validation")
_EMA = "hooks.ema."


def load_trained(
    run: RunDirectory, step: int | str | None, device: str | torch.device, weights: str, model: nn.Module | None
) -> nn.Module:
    """The model of a run with the weights of one of its checkpoints, verified as they are read, in evaluation mode."""
    if weights not in WEIGHTS:
        raise unknown_name("weights", weights, WEIGHTS, field="weights")
    device = _checked_device(device)
    store = CheckpointStore(run.checkpoints)
    checkpoint = store.open(chosen_step(run, store.steps(), step), every_byte=False)
    model = _built(run, device) if model is None else _given(run, compiled_in_place(model).to(device))
    tensors = checkpoint.stored()
    restore_model(model, _averaged(tensors) if weights == "ema" else tensors)
    return model.eval()


def chosen_step(run: RunDirectory, saved: list[int], step: int | str | None) -> int:
    """The step of the checkpoint that is meant: the newest, the best by the recipe's own measure, or a given one."""
    if not saved:
        raise InputError(
            f"{run.path}: the run has no checkpoint yet", hint="a run saves at its end, and every 10 minutes by default"
        )
    if step is None:
        return saved[-1]
    if step == "best":
        return _best_step(run, saved)
    if step not in saved:
        raise InputError(
            f"step: found {step!r}, which is not saved; allowed: {', '.join(map(str, saved))}, or 'best'",
            hint="checkpoint.keep in the recipe says how many are kept, checkpoint.every how often one is made",
            field="step",
            found=step,
            allowed=saved,
        )
    return int(step)


def _best_step(run: RunDirectory, saved: list[int]) -> int:
    block = evaluate_block(run)
    best = best_evaluation(evaluations(read_metrics(run), block.metric), block)
    if best is None:
        raise InputError(
            f"step: found 'best', but no evaluation has measured validation {block.metric}",
            hint="the newest checkpoint is load_model()",
            field="step",
            found="best",
            allowed=saved,
        )
    if best.step not in saved:
        raise InputError(
            f"step: the best validation {block.metric} was {best.value:.4g} at step {best.step}, which is not saved; "
            f"allowed: {', '.join(map(str, saved))}",
            hint="with `checkpoint: {best: true}` in the recipe, the best one is kept",
            field="step",
            found="best",
            allowed=saved,
        )
    return best.step


def first_samples(run: RunDirectory, samples: int, split: str, device: str | torch.device) -> Any:
    """A batch of the run's own data, prepared as in training: what goes to the model, targets included."""
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS, field="split")
    recipe, plan = _resolved(run)
    if recipe is None or recipe.data.use == OWN:
        raise InputError("data: the run's own loop or script brought the data, which no recipe names", field="data")
    data = open_data(recipe, "train" if split == "train" else "validation")
    if data is None or not 1 <= samples <= data.length:
        found = data.length if data else 0
        raise InputError(
            f"samples: found {samples}, allowed: 1 to {found}, the number of {split} samples",
            field="samples",
            found=samples,
            allowed=found,
        )
    raw = data.fetch(np.arange(samples, dtype=np.int64), recipe.seed)
    return _moved(data.finish(raw, _dtype(plan)), _checked_device(device))


def _built(run: RunDirectory, device: torch.device) -> nn.Module:
    recipe, plan = _resolved(run)
    if recipe is None or recipe.model.use == OWN:
        raise InputError(
            "model: the run's own loop or script made the model, so there is no recipe to build it from",
            hint="give it one to load into: result.load_model(model=Net())",
            field="model",
        )
    return build_model(recipe, device, _dtype(plan), load_weights=False)  # the checkpoint has them


def _given(run: RunDirectory, model: nn.Module) -> nn.Module:
    """A model that the caller made, as `Run.prepare` makes it ready: of adapters, the checkpoint has nothing else."""
    recipe, _ = _resolved(run)
    if recipe is None or recipe.lora is None or base_of(model) is not None:  # one that was prepared has them already
        return model
    return finished_model(recipe, model)


def _resolved(run: RunDirectory) -> tuple[Recipe | None, Plan]:
    """Recipe and plan of the newest attempt; a script has neither."""
    folder = run.attempt_path(max(run.attempts, default=0))
    if not (folder / "recipe.yaml").exists():
        return None, Plan()
    return Recipe.load(folder / "recipe.yaml"), Plan.load(folder / "plan.yaml")


def _dtype(plan: Plan) -> torch.dtype:
    """That of the weights: 16 bits are only ever computed in."""
    return torch.float64 if plan.precision == "fp64" else torch.float32


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_moved(value, device) for value in batch)
    return batch.to(device) if isinstance(batch, Tensor) else batch


def _averaged(tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """The moving average in place of the weights that it follows; buffers and frozen weights are the model's."""
    averages = {f"model.{name.removeprefix(_EMA)}": t for name, t in tensors.items() if name.startswith(_EMA)}
    if not averages:
        raise InputError(
            "weights: found 'ema', but the checkpoint has no moving average",
            hint="train with `hooks: [ema]` in the recipe, or use weights='model'",
            field="weights",
            found="ema",
            allowed="model",
        )
    return {**tensors, **averages}


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or (found.type == "cuda" and not torch.cuda.is_available()):
        here = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise InputError(
            f"device: found {str(device)!r}, allowed here: {', '.join(here)}",
            field="device",
            found=str(device),
            allowed=here,
        )
    return found
