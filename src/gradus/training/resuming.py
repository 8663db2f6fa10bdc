"""Resuming: a live run as a checkpoint left it. What cannot be trusted is named, and the one before it is used."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gradus.checkpoint.local_tier import commit_drained, drain
from gradus.checkpoint.manifest import DamagedCheckpoint
from gradus.checkpoint.report import Report
from gradus.checkpoint.retention import clear_leftovers
from gradus.checkpoint.state import put, restore_model, restore_optimizer
from gradus.checkpoint.store import Checkpoint
from gradus.data.position import DataPosition, check_same_data
from gradus.schema.errors import InputError
from gradus.training.changed_settings import changed_settings, changes_text
from gradus.training.hooks import Hooks
from gradus.training.saving import Saving
from gradus.training.training_state import TrainingState

if TYPE_CHECKING:
    from gradus.training.live_run import LiveRun


def newest_checkpoint(live: LiveRun) -> Checkpoint | None:
    """The newest checkpoint that looks whole, if there is one. Rank 0 decides which.

    Where loading finds out about every byte and there is a way back, sizes and the manifest do for now.
    """
    while True:
        step = _proposed(live)
        if step is None:
            return None
        found, damage = None, None
        try:
            found = live.store.open(step, every_byte=False)
        except DamagedCheckpoint as error:  # as this rank sees it, perhaps through another node's file system
            damage = error.message
        if _agreed(live, step, damage):
            assert found is not None
            return found


def _proposed(live: LiveRun) -> int | None:
    """The step that rank 0 would go on from."""
    proposed: list[int | None] = [None]
    if live.world.leads:
        newest, damaged = live.store.newest(every_byte=not live.rebuilds, passed_over=live.distrusted)
        for problem in damaged:
            _tell_of_damage(live, problem.message)
        proposed = [newest.step if newest else None]
        live.distrusted |= {step for step in live.store.steps() if newest is None or step > newest.step}
    if live.world.size > 1:
        dist.broadcast_object_list(proposed, src=0)
    return proposed[0]


def _agreed(live: LiveRun, step: int, damage: str | None) -> bool:
    """Whether no rank has found a checkpoint damaged; if one has, all know, and it is not to be trusted."""
    found = [damage]
    if live.world.size > 1:
        found = [None] * live.world.size
        dist.all_gather_object(found, damage)
    damages = sorted({message for message in found if message is not None})
    for message in damages:
        _tell_of_damage(live, message)
    if damages:
        live.distrusted.add(step)
    return not damages


def bring_home(live: LiveRun) -> None:
    """Before a run goes on: what an attempt that died left on the disks of nodes becomes a checkpoint, if it is whole.

    What was never finished is cleared away. Nobody is saving yet; all ranks must call it.
    """
    local, folder = live.store.local, live.store.folder
    before = str(max((attempt for attempt in live.run.attempts if attempt < live.attempt), default=live.attempt - 1))
    reports: list[Report] = []
    if local is not None and live.world.local_rank == 0:
        reports = drain(local, folder, attempt=before)
    live.world.barrier()
    if live.world.leads:
        if local is not None:
            reports += commit_drained(folder, attempt=before)
        cleared = clear_leftovers(folder)
        for path in cleared.gone:
            message = f"a checkpoint that was never finished is cleared away: {path.name}"
            live.recorder.event("checkpoint-note", message=message)
        for problem in cleared.problems:
            message = f"a checkpoint that was never finished cannot be cleared away: {problem}"
            live.recorder.event("checkpoint-note", message=message)
    for report in reports:
        if report.kind == "failed":
            live.recorder.problem("local-checkpoint-lost", report.message)
        elif report.kind == "note":
            live.recorder.event("checkpoint-note", message=report.message)
        elif report.kind == "committed":
            live.recorder.event(
                "checkpoint", step=report.step, message=f"step {report.step} came from the nodes' disks"
            )
    live.world.barrier()


def resumed(live: LiveRun, checkpoint: Checkpoint) -> bool:
    """Go on from a checkpoint, unless one of the ranks finds it damaged: then it is told, and not to be trusted."""
    damage: str | None = None
    try:
        _resume(live, checkpoint)
    except DamagedCheckpoint as error:
        damage = error.message
    if not _agreed(live, checkpoint.step, damage):
        return False
    _tell_of_resume(live)
    return True


def _tell_of_resume(live: LiveRun) -> None:
    message, changed = f"goes on from step {live.state.step}", dict[str, Any]()
    # What this attempt itself saved, and goes back to, is of no other settings.
    if live.world.leads and not live.rolled_back and (changes := changed_settings(live.run, live.attempt)):
        message = f"{message} with {changes_text(changes)}"
        changed = {"changed": {change.key: [change.before, change.now] for change in changes}}
    live.recorder.event("resume", step=live.state.step, message=message, **changed)


def step_back(live: LiveRun) -> None:
    """After a damaged checkpoint: the one before it is next, and nothing stays of what was made for or of this one.

    The model is to be built anew. A rank that found nothing wrong with its own part has taken all of it over.
    """
    live.checkpoint = newest_checkpoint(live)
    live.state = TrainingState()
    live.hooks = Hooks(live, live.recipe.hooks)
    live.saving = Saving(live)  # or else the damaged one would count as saved
    live.objective = live.local_sgd = None
    del live.model, live.optimizer, live.step
    gc.collect()  # modules hold each other, and the new ones need the memory


def _tell_of_damage(live: LiveRun, message: str) -> None:
    live.recorder.event("fault", kind="damaged-checkpoint", message=f"a damaged checkpoint is passed over: {message}")


def _resume(live: LiveRun, checkpoint: Checkpoint) -> None:
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


def check_same_stream(live: LiveRun, checkpoint: Checkpoint) -> None:
    """The position in the stream is a number of samples; it must mean the same samples as when it was saved."""
    accept = live.run.changed_data_mark(live.attempt).exists()
    note = check_same_data(checkpoint.state["specification"], live.specification, accept=accept)
    if note is not None:
        live.recorder.event("data", message=note)
    if checkpoint.step > live.total_steps:
        raise InputError(
            f"the run is at step {checkpoint.step} already, beyond its budget of {live.total_steps} now",
            hint=f"--set steps={checkpoint.step * 2}, or start a new run",
            field="steps",
            found=live.total_steps,
            allowed=f"at least {checkpoint.step}",
        )
    samples = DataPosition.from_document(checkpoint.state["data"]).samples
    if samples < min(checkpoint.step * live.recipe.batch, live.total_samples):
        raise InputError(
            f"the run ended after {samples} samples with a short batch; going on would skip the samples that would "
            "have filled it",
            hint="start a new run with the larger budget",
            field="epochs",
        )
