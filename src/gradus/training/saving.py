"""Saving: a live run as a checkpoint, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradus.checkpoint.gathering import gathered
from gradus.checkpoint.state import collect, put, restore_model, restore_optimizer
from gradus.checkpoint.store import Checkpoint
from gradus.checkpoint.writing import Writable
from gradus.parallel.shard import let_go
from gradus.schema.errors import GradusError, InputError
from gradus.training.training_state import TrainingState

if TYPE_CHECKING:
    from gradus.training.live_run import LiveRun


def save(live: LiveRun, required: bool) -> bool:
    """A checkpoint of the present step, and whether it is there. Rank 0 writes what all ranks hold together.

    One that cannot be written in the middle of a run is reported, and training goes on; at its end there is no later
    one that would do.
    """
    live.meet()
    let_go(live.model)
    step, problem = live.state.step, None
    tensors, optimizer_numbers = _collected(live)
    gathering = gathered(tensors, live.world)
    try:
        if live.world.leads:
            _write(live, gathering.tensors, optimizer_numbers)
        else:
            gathering.give()
    except OSError as error:
        problem = error
        live.recorder.problem("checkpoint-failed", _cannot_be_written(step, error))
    saved = _told_by_rank_0(problem is None, live)
    live.recorder.restart_clock()
    if not saved and required:
        newest = max(live.store.steps(), default=None)
        kept = "there is none" if newest is None else f"the newest one is of step {newest}"
        raise GradusError(
            f"{_cannot_be_written(step, problem)}; {kept}",
            hint=f"make room in {live.run.path}, then go on with --resume",
        ) from problem
    return saved


def _cannot_be_written(step: int, error: OSError | None) -> str:
    return f"the checkpoint of step {step} cannot be written: {error or 'rank 0 says why'}"


def _told_by_rank_0(saved: bool, live: LiveRun) -> bool:
    """All ranks must know the same of it: a hook that they all call may make them talk to each other."""
    if live.world.size == 1:
        return saved
    told = torch.tensor(int(saved))  # of the host, which gloo sends
    dist.broadcast(told, src=0)
    return bool(told.item())


def _collected(live: LiveRun) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors that this rank holds, whole or in part, and what of the optimizer is no tensor."""
    tensors, numbers = collect(live.model, live.optimizer)
    if live.step.loss_scale is not None:
        tensors |= {f"loss_scale.{name}": value for name, value in live.step.loss_scale.state().items()}
    tensors |= live.hooks.tensors()
    if live.world.mesh.pipeline > 1:  # each stage has the numbers of its own parameters
        stages: list[dict[str, Any]] = [{} for _ in range(live.world.mesh.pipeline)]
        dist.all_gather_object(stages, numbers["parameters"], group=live.world.submesh("pipeline").get_group())
        numbers["parameters"] = {name: value for stage in stages for name, value in stage.items()}
    return tensors, numbers


def _write(live: LiveRun, tensors: dict[str, Writable], optimizer_numbers: dict[str, Any]) -> None:
    step, recipe = live.state.step, live.recipe
    state = {
        "training": live.state.document(),
        "optimizer": {"use": recipe.optimizer.use, **optimizer_numbers},
        "samples": min(step * recipe.batch, live.total_samples),
        "dataset_length": live.train_data.length,
        "batch": recipe.batch,
        "seed": recipe.seed,
        "tokenizer": live.tokenizer_hash,
        "scheduler": _plain(live.scheduler.state_dict()) if live.scheduler is not None else None,
    }
    saved = live.store.save(step, tensors, state)  # which has verified it: older ones may go
    best = live.state.evaluation.best_step if recipe.checkpoint.best else None
    try:
        live.store.prune(step, recipe.checkpoint.keep, also_keep=best)
    except OSError as error:  # somebody may have one open on a network file system
        live.recorder.problem("prune-failed", f"an older checkpoint cannot be removed: {error}")
    live.recorder.event("checkpoint", step=step, path=str(saved.path.relative_to(live.run.path)))


def _plain(state: Any) -> Any:
    """What JSON can hold of a scheduler's state; it has the functions of the script's own anyway."""
    if isinstance(state, dict):
        return {str(key): _plain(value) for key, value in state.items() if not callable(value)}
    if isinstance(state, (list, tuple)):
        return [_plain(value) for value in state]
    return state if state is None or isinstance(state, (bool, int, float, str)) else None


def newest_checkpoint(live: LiveRun) -> Checkpoint | None:
    """The newest checkpoint that can be trusted, if there is one. Rank 0 decides which."""
    step = torch.full((), -1, dtype=torch.int64, device=live.world.device)
    newest = None
    if live.world.leads:
        newest, damaged = live.store.newest()
        for problem in damaged:
            live.recorder.event("fault", kind="damaged-checkpoint", message=problem.message)
        step.fill_(newest.step if newest else -1)
    if live.world.size > 1:
        dist.broadcast(step, src=0)
    if step.item() < 0:
        return None
    return newest or live.store.open(int(step.item()))  # rank 0 has read and verified it already


def resume(live: LiveRun, checkpoint: Checkpoint) -> None:
    """Go on from a checkpoint: weights, optimizer, loss scale, hooks, and the step. Each rank reads its own part."""
    tensors, optimizer = checkpoint.stored(), checkpoint.state["optimizer"]
    restore_model(live.model, tensors, live.world)
    use = live.recipe.optimizer.use
    if optimizer["use"] == use:
        groups = not live.recipe.optimizer.built_in  # only those of others keep something there
        restore_optimizer(live.model, live.optimizer, tensors, optimizer, groups=groups)
    else:
        live.recorder.event("resume", message=f"optimizer {use} starts anew; the run had {optimizer['use']} before")
    if live.step.loss_scale is not None and "loss_scale.scale" in tensors:  # else the run had another precision
        for name, value in live.step.loss_scale.state().items():
            put(value, tensors[f"loss_scale.{name}"])
    scheduler = checkpoint.state.get("scheduler")
    if live.scheduler is not None and scheduler is not None:
        live.scheduler.load_state_dict(scheduler)
        for group, rate in zip(live.optimizer.param_groups, live.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate  # some schedulers go on from there, and not from their own count
    live.hooks.restore(tensors)
    live.state = TrainingState.from_document(checkpoint.state["training"])
    live.recorder.event("resume", step=live.state.step)


def check_same_data(live: LiveRun, checkpoint: Checkpoint) -> None:
    """The position in the stream is a step number; it must mean the same samples as when it was saved."""
    for key in ("batch", "seed"):
        began, found = checkpoint.state.get(key), getattr(live.recipe, key)
        if began is not None and began != found:
            raise InputError(
                f"{key}: the run began with {began}, found {found}: its samples would be others",
                hint="start a new run for that",
                field=key,
                found=found,
                allowed=began,
            )
    if checkpoint.step > live.total_steps:
        raise InputError(
            f"the run is at step {checkpoint.step} already, beyond its budget of {live.total_steps} now",
            hint=f"--set steps={checkpoint.step * 2}, or start a new run",
            field="steps",
            found=live.total_steps,
            allowed=f"at least {checkpoint.step}",
        )
    length, samples = checkpoint.state["dataset_length"], checkpoint.state["samples"]
    if length != live.train_data.length:
        raise InputError(
            f"data: the run began with {length} training samples, found {live.train_data.length}: their order "
            "would be another",
            hint="start a new run with the new data, or bring the old data back",
            field="data",
            found=live.train_data.length,
            allowed=length,
        )
    if samples < min(checkpoint.step * live.recipe.batch, live.total_samples):
        raise InputError(
            f"the run ended after {samples} samples with a short batch; going on would skip the samples that would "
            "have filled it",
            hint="start a new run with the larger budget",
            field="epochs",
        )
    tokenizer = checkpoint.state.get("tokenizer")
    if tokenizer is not None and live.tokenizer_hash is not None and tokenizer != live.tokenizer_hash:
        raise InputError(
            f"data.tokenizer: the run began with another tokenizer (hash {tokenizer[:12]}, found "
            f"{live.tokenizer_hash[:12]}): token numbers would mean other text",
            hint="bring the old tokenizer back, or start a new run",
            field="data.tokenizer",
            found=live.tokenizer_hash,
            allowed=tokenizer,
        )
