"""Work: what a benchmark's rank does again and again. A reference model on random data, or a recipe's own steps."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from gradus.models.catalogue import Reference, construct, resolve
from gradus.models.settings import Settings, image_shape
from gradus.parallel.world import World, alone
from gradus.planner.defaults import default_plan
from gradus.record.directory import RunDirectory
from gradus.schema.plan import Precision
from gradus.schema.recipe import Recipe
from gradus.training.calibration import on_one_rank
from gradus.training.compilation import compile_model
from gradus.training.float8 import check_float8, use_float8
from gradus.training.live_run import LiveRun
from gradus.training.precision import apply_backend_settings, numbers_for

_MANY_STEPS = 10**6


class Work(Protocol):
    """One rank's share of it."""

    samples: int  # that this rank trains on in a step
    unit: str  # "img" or "seq"
    tokens: int | None  # of a sample
    parameters: int
    flops_per_sample: float | None

    def step(self) -> None: ...


class SyntheticWork:
    """A model from the catalogue, trained on one random batch that stays on the device, as Horovod's benchmark does.

    Replicas are plain DDP with batch statistics of their own: other tools measure that.
    """

    def __init__(self, asked: Mapping[str, Any], world: World) -> None:
        precision: Precision = asked["precision"]
        device = world.device
        numbers = numbers_for(precision, device)
        apply_backend_settings(numbers, deterministic=False)
        torch.manual_seed(1 + world.rank)
        reference, settings = resolve(asked["model"], asked.get("options", {}))
        with device:
            model = construct(reference, settings)
        model = model.to(numbers.parameters)
        if asked.get("channels_last"):
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.samples = int(asked["batch_size"])
        self.unit = "seq" if reference.sample == "tokens" else "img"
        self.tokens: int | None = getattr(settings, "context", None)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.flops_per_sample = _flops_per_sample(model)
        if precision == "fp8":
            check_float8("tensor", device)
            use_float8(model, "tensor")
        if asked.get("compile"):
            compile_model(model)
        self._batch = random_batch(reference, settings, self.samples, device, numbers.parameters)
        if asked.get("channels_last"):
            self._batch = tuple(_channels_last(part) for part in self._batch)
        # Those of Horovod's benchmark and of everybody's language models.
        images = reference.sample == "image"
        chosen = torch.optim.SGD(model.parameters(), lr=0.01) if images else torch.optim.AdamW(model.parameters(), 1e-4)
        self._optimizer: torch.optim.Optimizer = chosen
        self._scaler = torch.amp.GradScaler(device.type, enabled=numbers.scales_loss)
        self._numbers, self._device = numbers, device
        self._model: nn.Module = model
        if asked.get("data_parallel"):
            self._model = DataParallel(model)
        elif world.size > 1 and asked.get("averaged", True):
            ids = [device.index] if device.type == "cuda" else None
            # Experts that no token chose, and a pooling layer that the loss does not see, have no gradient.
            some_unused = bool(getattr(settings, "experts", None) or getattr(settings, "pooler", False))
            self._model = DistributedDataParallel(model, device_ids=ids, find_unused_parameters=some_unused)

    def step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        with self._numbers.computing(self._device):
            loss_sum, count, _ = self._model(*self._batch)
        # The first sum, or those of several GPUs under DataParallel.
        loss = loss_sum.sum() / count.sum()
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()


def random_batch(
    reference: Reference, settings: Settings, samples: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Inputs and targets of the model, drawn at random."""
    if reference.sample == "tokens":
        shape, vocabulary = (samples, settings.context), settings.vocabulary  # type: ignore[attr-defined]
        return tuple(torch.randint(vocabulary, shape, device=device) for _ in range(2))
    channels, side = image_shape(settings)
    images = torch.randn(samples, channels, side, side, device=device, dtype=dtype)
    return images, torch.randint(settings.classes, (samples,), device=device)  # type: ignore[attr-defined]


class RecipeWork:
    """A recipe's own steps on one rank, its own data included. Nothing of them is kept."""

    def __init__(self, recipe: Recipe, device: torch.device, folder: Path) -> None:
        from gradus.hardware.cluster import detect_cluster

        plan = default_plan(recipe, detect_cluster(), 1).plan
        here, plan = on_one_rank(recipe, plan)
        here = here.model_copy(update={"steps": _MANY_STEPS})
        run = RunDirectory.create(Path(tempfile.mkdtemp(dir=folder)), "bench")
        self._live = LiveRun.from_recipe(here, plan, run, 1, alone(device), watched=False)
        self._batches = self._live.loader.micro_batches(0, self._live.total_steps)
        self._number = 0
        self.samples = here.batch
        self.tokens = self._live.tokens_per_sample
        self.unit = "img" if self.tokens is None else "seq"
        self.parameters = self._live.parameter_counts[0]
        self.flops_per_sample = self._live.flops_per_sample

    def step(self) -> None:
        live, step, objective = self._live, self._live.step, self._live.objective
        assert objective is not None
        for _ in range(step.accumulate):
            micro = next(self._batches)
            with step.forward(micro, self._number):
                losses = objective(step.model, micro.inputs, micro.samples)
            step.backward(losses.loss_sum, losses.count)
        step.apply(live.schedule(self._number), measure_norm=False)
        self._number += 1


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _flops_per_sample(model: nn.Module) -> float | None:
    counted = getattr(model, "flops_per_sample", None)
    return float(counted()) if callable(counted) else None
