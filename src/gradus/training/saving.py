"""Saving: a live run as checkpoints, one at a time in flight, while training goes on.

    boundary ─ copy of the state ─▶ writer (a process of its own) ─ part of this rank ─▶ rank 0's writer ─ COMMITTED

Every rank writes what it holds, and none waits for another. How it went is taken in at later boundaries; only where a
run ends or is to stop does it wait until the checkpoint is committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradus.checkpoint.owners import local_tensor, owned
from gradus.checkpoint.retention import Retention
from gradus.checkpoint.state import collect
from gradus.checkpoint.writer import Report, Writer
from gradus.data.staging import job_folder
from gradus.parallel.shard import let_go
from gradus.planner.budget import ASSUMED_WRITE_GB_PER_SECOND, nodes_of, write_gb_per_second
from gradus.record.directory import RunDirectory
from gradus.schema.errors import GradusError
from gradus.schema.stable_hash import stable_hash

if TYPE_CHECKING:
    from gradus.training.live_run import LiveRun

RESCUE_SECONDS = 60.0  # that a run which fails waits at most for a checkpoint that is being written
SILENT_SECONDS = 30.0  # that a step waits for the checkpoint before, and nobody is told
_ASK_PEERS_SECONDS = 1.0


class Saving:
    """The checkpoints of one attempt, as one rank sees them."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._writer: Writer | None = None
        self._snapshot: int | None = None  # the step that was copied last, unless it is known to have failed
        self.committed: int | None = live.checkpoint.step if live.checkpoint else None
        self._completed = self.committed  # the same on all ranks at any boundary, as the other two are not
        self._untold: list[int] = []  # on rank 0: committed, and other ranks have not heard of it
        self._told: set[int] = set()  # to hooks
        self._problem: str | None = None  # why the last one failed that did
        self._begun: dict[int, tuple[float, float]] = {}  # by step: when it was begun, and the stall
        self._next_question = 0.0
        self._say_waiting_at = float("inf")
        self.seconds: float | None = None  # that the last one took from its copy to its commit

    @property
    def in_flight(self) -> bool:
        return self._writer is not None and self._writer.in_flight is not None

    @property
    def being_written(self) -> int | None:
        """The step of a copy that is not known to be committed; may be asked for by any thread."""
        return self._snapshot if self._snapshot != self.committed else None

    @cached_property
    def expected_seconds(self) -> float:
        """What the first one will take, as far as can be known before; asked for at every boundary until then."""
        live = self._live
        plan = live.plan
        parameters = sum(local_tensor(tensor).nbytes for tensor in live.model.parameters())
        bytes_here = 3 * parameters  # with the two tensors that most optimizers keep for each
        rate = write_gb_per_second(live.cluster) if live.cluster is not None else ASSUMED_WRITE_GB_PER_SECOND
        on_node = 1 if live.cluster is None else -(-plan.mesh.world_size // nodes_of(plan, live.cluster))
        return bytes_here * on_node / (rate * 1e9)

    @property
    def newest(self) -> int | None:
        """The newest checkpoint of what this run computed, from the disk: ranks hear of a commit some steps late."""
        return max((step for step in self._live.store.steps() if step <= self._live.state.step), default=None)

    def has(self, step: int) -> bool:
        """Whether the state of this step is in a checkpoint, or on its way into one."""
        return step in (self._snapshot, self.committed)

    def prepare(self) -> None:
        """Make the memory for the copy, so that the first checkpoint does not take longer than later ones."""
        if self._writer is None and self._live.recipe.checkpoint.background:
            mine, _, _ = self._collected()
            self._writer = self._new_writer(background=True)
            self._writer.prepare(sum(local_tensor(tensor).nbytes for tensor in mine.values()))

    def begin(self) -> None:
        """Copy the state of this boundary; its writing goes on by itself. All ranks must call it."""
        began = time.monotonic()
        self._say_waiting_at = began + SILENT_SECONDS
        live = self._live
        live.watch.where.enter("saving")
        live.meet()
        let_go(live.model)
        live.samples.flush()
        step = live.state.step
        mine, held, numbers = self._collected()
        self._gather_stages(numbers)
        document = self._document(numbers) if live.world.leads else None
        if self._writer is None:
            self._writer = self._new_writer(background=live.recipe.checkpoint.background)
        stall = self._writer.save(step, mine, document, self._retention() if live.world.leads else None, held=held)
        self._snapshot = step
        stalled = time.monotonic() - began
        self._begun[step] = (began, stalled)
        live.interval.began()
        live.recorder.log(step, {"checkpoint_stall_seconds": stalled})
        if stall.waited_seconds > 1.0:
            live.recorder.event(
                "checkpoint-waited",
                step=step,
                seconds=stall.waited_seconds,
                message=f"step {step} waited {stall.waited_seconds:.1f} s until the checkpoint before was written: "
                "checkpoints are due faster than the disk takes them",
            )
        live.recorder.restart_clock()

    def take_in(self) -> None:
        """What the writer has to tell. Cheap enough for every boundary."""
        if self._writer is None:
            return
        for report in self._writer.poll():
            self._take(report)
        self._hear_of_failures_elsewhere()

    def complete(self, check_weights: Callable[[], None]) -> None:
        """Wait until the state of this boundary is committed. All ranks must call it. Weights are checked before.

        If it cannot be, the run cannot end well: there is no later checkpoint that would do.
        """
        live, step = self._live, self._live.state.step
        if self._completed == step:
            return
        live.watch.where.enter("saving")
        check_weights()
        began_before = self._all(self.has(step))
        if not began_before:
            self._begin_at_once()
        done = self._wait()
        if not done and began_before:  # it failed while training went on, which may have passed since
            self._begin_at_once()
            done = self._wait()
        live.recorder.restart_clock()
        if done:
            self._completed = self.committed = step
        else:
            newest = max(live.store.steps(), default=None)
            kept = "there is none" if newest is None else f"the newest one is of step {newest}"
            raise GradusError(
                f"{self._problem or f'the checkpoint of step {step} cannot be written'}; {kept}",
                hint=f"make room in {live.run.path}, then go on with --resume",
            )

    def rescue(self) -> None:
        """The run fails: what is being written is a good checkpoint all the same, and worth a while."""
        # Ranks that have written their part stay as well: when the first one leaves, the others are ended.
        if self._writer is not None and self._snapshot is not None and self._snapshot != self.committed:
            self._writer.wait("committed", RESCUE_SECONDS)
            self.take_in()

    def close(self, *, finished: bool = False) -> None:
        """No more saves. Of a run that is finished, nothing is left on the nodes' own disks."""
        self._live.samples.close()
        if self._writer is not None:
            self._writer.close(finished=finished)
            self._writer = None

    def _begin_at_once(self) -> None:
        """Where training waits anyway, no process and no memory for a copy are needed."""
        if self._writer is None:
            self._writer = self._new_writer(background=False)
        self.begin()

    def _wait(self) -> bool:
        """Until the snapshot of this step is committed, or is known to fail: the same answer on all ranks."""
        live, step, writer = self._live, self._live.state.step, self._writer
        live.watch.where.enter("saving")
        if self._all(self.committed == step or not live.world.leads):  # rank 0 knows
            return True
        assert writer is not None
        report = writer.wait("written" if live.store.local is None else "copied")
        if self._all(report is not None and report.kind != "failed"):
            while live.world.leads and self.has(step) and self.committed != step:
                writer.wait("committed", _ASK_PEERS_SECONDS)
                self.take_in()
        elif live.world.leads:
            writer.abandon(step, "another rank could not write its part")
            writer.wait("committed")
        self.take_in()
        committed = self._all(self.committed == step or not live.world.leads)
        self._tell_all()
        if not committed:
            self._snapshot = None
        return committed

    def _take(self, report: Report) -> None:
        live = self._live
        if report.kind == "committed":
            self.committed = report.step
            began, stalled = self._begun.pop(report.step, (time.monotonic(), 0.0))
            self.seconds = time.monotonic() - began
            live.interval.took(stalled, self.seconds)
            live.recorder.event(
                "checkpoint",
                step=report.step,
                path=str(live.store.path(report.step).relative_to(live.run.path)),
                stall_seconds=stalled,
                seconds=self.seconds,
                bytes=report.bytes,
            )
            if live.world.leads:
                self._untold.append(report.step)
                live.announcements.announce("committed", live.state.step, about=report.step)
        elif report.kind == "failed":
            self._problem = report.message
            if self._snapshot == report.step:
                self._snapshot = None
            live.recorder.problem("checkpoint-failed", report.message)
            if not live.world.leads and live.world.store is not None:
                live.world.store.set(_failure_key(report.step), f"rank {live.world.rank}: {report.message}")
        elif report.kind == "retrying":
            live.recorder.problem("checkpoint-retry", report.message)
        elif report.kind == "prune-failed":
            live.recorder.problem("prune-failed", report.message)
        elif report.kind == "note":
            live.recorder.event("checkpoint-note", message=report.message)

    def tell(self, step: int) -> None:
        """On all ranks, at the same boundary: a checkpoint is committed."""
        self.committed = max(step, self.committed or 0)
        self._untold = [untold for untold in self._untold if untold != step]
        if step not in self._told:  # an announcement may come after a run's end has been told of it
            self._told.add(step)
            self._live.watch.where.enter("hooks")
            self._live.hooks.on_checkpoint(self._live.store.path(step))

    def _tell_all(self) -> None:
        """Of those that were committed and not yet told: nothing is announced any more where a run ends."""
        told = torch.full((4,), -1, dtype=torch.int64)
        if self._live.world.leads:
            told[: len(self._untold)] = torch.tensor(self._untold[:4], dtype=torch.int64)
        if self._live.world.size > 1:
            dist.broadcast(told, src=0)
        for step in told.tolist():
            if step >= 0:
                self.tell(step)

    def _hear_of_failures_elsewhere(self) -> None:
        """Rank 0's writer would wait for the part of a rank that cannot write it."""
        world, writer = self._live.world, self._writer
        if not world.leads or world.store is None or writer is None or writer.in_flight is None:
            return
        if time.monotonic() < self._next_question:
            return
        self._next_question = time.monotonic() + _ASK_PEERS_SECONDS
        key = _failure_key(writer.in_flight)
        if world.store.check([key]):
            writer.abandon(writer.in_flight, world.store.get(key).decode())

    def _wait_for_the_one_before(self) -> None:
        """A slow disk must not make a run stand still without a word."""
        self.take_in()
        if time.monotonic() >= self._say_waiting_at:
            self._say_waiting_at = float("inf")
            step = self._live.state.step
            message = f"step {step} waits for the checkpoint before to be written, for {SILENT_SECONDS:g} s so far"
            self._live.recorder.event("checkpoint-waits", step=step, message=message)

    def _all(self, mine: bool) -> bool:
        """Whether it is so on all ranks, all of which must ask."""
        if self._live.world.size == 1:
            return mine
        agreed = torch.tensor(int(mine))  # of the host, which gloo sends
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return bool(agreed.item())

    def _new_writer(self, *, background: bool) -> Writer:
        live = self._live
        world = live.world
        return Writer(
            live.run.checkpoints,
            world.rank,
            world.size,
            world.device,
            background=background,
            local=live.store.local,
            attempt=str(live.attempt),
            on_wait=self._wait_for_the_one_before,
            began_from=live.checkpoint.step if live.checkpoint else None,
        )

    def _collected(self) -> tuple[dict[str, Tensor], list[str], dict[str, Any]]:
        """The tensors, or parts of them, that this rank writes; names of all it has; and numbers of the optimizer."""
        live = self._live
        tensors, numbers = collect(live.model, live.optimizer)
        if live.step.loss_scale is not None:
            tensors |= {f"loss_scale.{name}": value for name, value in live.step.loss_scale.state().items()}
        tensors |= live.hooks.tensors()
        return owned(tensors, live.world, alone=live.hooks.of_rank_0(tensors)), list(tensors), numbers

    def _gather_stages(self, numbers: dict[str, Any]) -> None:
        """Each stage of a pipeline has the numbers of its own parameters: rank 0 writes down all of them."""
        world = self._live.world
        if world.mesh.pipeline > 1:
            stages: list[dict[str, Any]] = [{} for _ in range(world.mesh.pipeline)]
            dist.all_gather_object(stages, numbers["parameters"], group=world.submesh("pipeline").get_group())
            numbers["parameters"] = {name: value for stage in stages for name, value in stage.items()}

    def _document(self, optimizer: Mapping[str, Any]) -> dict[str, Any]:
        """All that a checkpoint holds besides tensors."""
        live = self._live
        recipe, samples = live.recipe, min(live.state.step * live.recipe.batch, live.total_samples)
        return {
            "recipe_hash": f"{stable_hash(recipe.to_yaml()):016x}",
            "plan_hash": f"{stable_hash(live.plan.to_yaml()):016x}",
            "mesh": live.plan.mesh.model_dump(),
            "samples": samples,
            "state": {
                "training": live.state.document(),
                "optimizer": {"use": recipe.optimizer.use, **optimizer},
                "data": live.position(samples).document(),
                "specification": live.specification,
                "scheduler": _plain(live.scheduler.state_dict()) if live.scheduler is not None else None,
            },
        }

    def _retention(self) -> Retention:
        checkpoint = self._live.recipe.checkpoint
        best = self._live.state.evaluation.best_step if checkpoint.best else None
        return Retention(checkpoint.keep, checkpoint.keep_every, best)


def local_tier(given: str | None, run: RunDirectory) -> Path | None:
    """The run's folder on this node's own disk: where the recipe says, or in the job's own scratch space (`auto`)."""
    if given is None:
        return None
    base = given if given != "auto" else job_folder()
    return Path(base) / f"{run.name}-{run.id}" if base else None


def _failure_key(step: int) -> str:
    return f"checkpoint-failed-{step}"


def _plain(state: Any) -> Any:
    """What JSON can hold of a scheduler's state; it has the functions of the script's own anyway."""
    if isinstance(state, dict):
        return {str(key): _plain(value) for key, value in state.items() if not callable(value)}
    if isinstance(state, (list, tuple)):
        return [_plain(value) for value in state]
    return state if state is None or isinstance(state, (bool, int, float, str)) else None
