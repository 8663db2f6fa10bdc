"""LiveRun: everything that one rank holds while a run is alive.

It is put together in stages: data, model, and then `begin`. A recipe names all of them; an own loop brings its model
first and its data later.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from gradus.checkpoint.part import COMMITTED
from gradus.checkpoint.store import Checkpoint, CheckpointStore
from gradus.data.loader import Indexed, Loader, Slices
from gradus.data.order import Order
from gradus.data.orders import order_for
from gradus.data.position import DataPosition, specification_hash, specification_of, with_skipped
from gradus.data.workers import loader_stacks
from gradus.faults.announcements import Announcements
from gradus.faults.deadline import deadline_of
from gradus.faults.departures import Departures
from gradus.faults.stop_request import StopRequest
from gradus.faults.watch import Watch
from gradus.faults.watchdog import Patience
from gradus.hardware.rank_cores import cores_of_rank
from gradus.parallel.context import split_sequence
from gradus.parallel.local_sgd import LocalSGD
from gradus.parallel.replicate import share_buffers
from gradus.parallel.shard import let_go
from gradus.parallel.world import World
from gradus.planner.budget import between_failures, length_of
from gradus.planner.resolve import check_model_fits_data
from gradus.record.directory import RunDirectory
from gradus.record.variables import BIND, OWN
from gradus.schema.cluster import Cluster
from gradus.schema.errors import GradusError, InputError
from gradus.schema.intervals import seconds_of
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe
from gradus.training.breakdown import Timings
from gradus.training.building import open_data
from gradus.training.described import described_model
from gradus.training.evaluation import Measure, evaluate
from gradus.training.float8 import Float8Layers
from gradus.training.hooks import Hooks
from gradus.training.model_to_step import use_model
from gradus.training.objective import Objective
from gradus.training.out_of_memory import out_of_memory_explained
from gradus.training.pipeline_step import PipelineStep
from gradus.training.precision import Numbers, apply_backend_settings, numbers_for
from gradus.training.profiling import Bystander, Profiling
from gradus.training.recorder import Recorder
from gradus.training.resuming import bring_home, check_same_stream, newest_checkpoint, resumed, step_back
from gradus.training.rollback import check_can_recover, left_out_by_rollbacks
from gradus.training.same_on_ranks import check_same_data_on_ranks
from gradus.training.save_interval import SaveInterval
from gradus.training.saving import Saving, local_tier
from gradus.training.schedules import Schedule, learning_rate, scaled_peak
from gradus.training.staged import staged_recipe
from gradus.training.step import TrainingStep
from gradus.training.told_at_start import tell_start
from gradus.training.trained_samples import TrainedSamples
from gradus.training.training_state import TrainingState

EVALUATION_ORDER = 0  # the key of the order in which validation samples are taken: the same for every run


@dataclass
class Evaluator:
    loader: Loader
    batches: int


class LiveRun:
    train_data: Indexed
    order: Order
    specification: dict[str, Any]  # what decides which sample is at which position
    loader: Loader
    samples: TrainedSamples
    model: nn.Module  # without wrappers; `step.model` is what is called
    optimizer: torch.optim.Optimizer
    objective: Objective | None = None
    step: TrainingStep
    schedule: Schedule
    total_samples = 0  # until the data is known
    total_steps: int
    tokens_per_sample: int | None = None
    tokenizer_hash: str | None = None
    flops_per_sample: float | None = None
    evaluator: Evaluator | None = None
    local_sgd: LocalSGD | None = None
    parameter_counts: tuple[int, int]  # of the whole model: all, and those that are trained
    float8_layers: Float8Layers | None = None  # of the whole model, with precision fp8
    recompute_note: str | None = None  # of the whole model
    may_chunk_loss: bool = False  # where memory runs out, it is worth trying
    scheduler: LRScheduler | None = None  # an own loop's, in place of the recipe's schedule
    rolled_back = False  # in this attempt, to a checkpoint of the same settings
    last_loss: float | None = None  # of the last step whose numbers have arrived
    profiling: Profiling | Bystander | None = None  # where a trace of some steps is asked for

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        run: RunDirectory,
        attempt: int,
        world: World,
        *,
        rebuilds: bool = False,
        watched: bool = True,
    ) -> None:
        """`rebuilds`: whether the model can be built anew if loading finds its checkpoint damaged. `watched`: whether
        the run is ended if it hangs."""
        world = world.arranged(plan.mesh)
        self.recipe, self.plan, self.run, self.attempt, self.world = recipe, plan, run, attempt, world
        # First of all: its heartbeat shows that the run is alive while a large model is built or loaded.
        self.recorder = Recorder(run, attempt, world, recipe.log_every)
        self.watch = Watch(
            run,
            attempt,
            world,
            self.recorder.event,
            Patience.of(recipe.watchdog if watched else None),
            being_written=self._commit_to_come,
            more_stacks=loader_stacks,
        )
        self.recorder.on_start, self.recorder.on_restart = self.watch.start, self.watch.elsewhere
        self.recorder.on_close = self.watch.close
        on_problem = partial(self.recorder.problem, "write-error")
        self.recorder.timings = Timings(run, attempt, world, self.watch.own, on_problem)
        self.state = TrainingState()
        self.store = CheckpointStore(run.checkpoints, local_tier(recipe.checkpoint.local, run))
        self.stop = StopRequest(run.stop_file, world, deadline=deadline_of())
        self.announcements, self.departures = Announcements(world), Departures(world)
        self.cluster = _cluster_of(run, attempt)
        self.interval = SaveInterval(plan.checkpoint_every, between_failures(plan, self.cluster))
        self.rebuilds = rebuilds
        self.distrusted: set[int] = set()  # steps of checkpoints that were found damaged
        with self.recorder.told_of_failure():
            check_can_recover(recipe, plan, own_loop=not rebuilds)
            self.numbers: Numbers = numbers_for(plan.precision, world.device)
            apply_backend_settings(self.numbers, recipe.deterministic)
            torch.autograd.set_detect_anomaly(recipe.anomaly)
            self.hooks = Hooks(self, recipe.hooks)
            bring_home(self)
            self.checkpoint: Checkpoint | None = newest_checkpoint(self)  # to go on from
            self.saving = Saving(self)

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, plan: Plan, run: RunDirectory, attempt: int, world: World, *, watched: bool = True
    ) -> LiveRun:
        """All that the recipe names, built and, where there is a checkpoint, restored."""
        live = cls(recipe, plan, run, attempt, world, rebuilds=True, watched=watched)
        with live.recorder.told_of_failure(), out_of_memory_explained(live):
            live.watch.where.enter("staging")
            here = staged_recipe(live)
            live.watch.where.enter("building")
            train = open_data(here, "train")
            if train is None:
                raise InputError("data.use: there are no training samples", field="data.use", found=0, allowed=">= 1")
            live.use_data(train)
            validation = open_data(here, "validation")
            live.evaluator = live.evaluator_for(validation) if validation is not None else None
            check_same_data_on_ranks(live)
            live.rebuild()
            live.begin()
        return live

    def rebuild(self) -> None:
        """The model, built and, where there is a checkpoint, as the newest that can be trusted left it."""
        self._build_model()
        while not self.restore():
            step_back(self)
            self._build_model()

    def _build_model(self) -> None:
        self.watch.where.enter("building")
        recipe, plan = self.recipe, self.plan
        described = described_model(
            recipe,
            self.world,
            self.numbers.parameters,
            divided=plan.divided,
            load_weights=self.checkpoint is None,
        )
        self.objective = Objective(recipe, described.model, context=plan.mesh.context)
        self.objective.check_metric(recipe.evaluate.metric, reference_model=recipe.model.built_in)
        use_model(self, described)

    def use_data(self, data: Indexed) -> None:
        recipe, source = self.recipe, data.source
        self.train_data = data
        self.tokens_per_sample = source.tokens_per_sample if source else None
        self.tokenizer_hash = getattr(source, "tokenizer_hash", None)
        check_model_fits_data(recipe, source.vocabulary if source else None, source.classes if source else None)
        length = length_of(recipe, data.length, self.tokens_per_sample)
        assert length is not None, "the dataset is there"
        self.total_samples, self.total_steps = length.samples, length.steps
        self.order = order_for(data, recipe.data, recipe.seed, recipe.batch)
        self.specification = specification_of(recipe, data, self.order)
        self._make_loader()

    def warn(self, message: str) -> None:
        self.recorder.event("warning", message=message)

    def restore(self) -> bool:
        """Put the state of the checkpoint in place, if there is one. False: it is damaged, and so is the state now."""
        self.watch.where.enter("loading")
        return self.checkpoint is None or resumed(self, self.checkpoint)

    def begin(self) -> None:
        """Data and model are there: check that they fit what was restored, and say how it starts."""
        if self.checkpoint is not None:
            check_same_stream(self, self.checkpoint)
        elif self.world.leads and self.distrusted:
            self.recorder.event("resume", step=0, message="no checkpoint can be used: starts again from step 0")
        self.leave_out([*self.recipe.data.skip, *left_out_by_rollbacks(self)])
        self.schedule = learning_rate(self.recipe.optimizer, self.recipe.batch, self.total_steps)
        tell_start(self)
        self.samples = TrainedSamples(self)
        if self.plan.workers == "auto":
            self._choose_workers()
        _, scaling = scaled_peak(self.recipe.optimizer, self.recipe.batch)
        if scaling:
            self.recorder.event("learning-rate", message=scaling)

    def leave_out(self, positions: Sequence[Sequence[int]]) -> None:
        """Of the stream, from now on, besides those that the checkpoint says are to be skipped."""
        before, trained = self.state.skipped_positions, min(self.state.step * self.recipe.batch, self.total_samples)
        self.state.skipped_positions = with_skipped(before, positions, trained)
        if self.state.skipped_positions:
            self._make_loader()  # it was made before they were known
        if self.state.skipped_positions != before:
            told = ", ".join(f"{first} to {end - 1}" for first, end in self.state.skipped_positions)
            self.recorder.event("data", message=f"positions {told} of the stream are left out (data.skip)")

    def _choose_workers(self) -> None:
        own = os.environ.get(BIND) == OWN
        cores = cores_of_rank(1 if own else int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        chosen = self.loader.choose_workers(self.state.step, cores)
        if chosen is None:
            return
        self.recorder.event("workers", message=chosen.reason, workers=chosen.workers)
        if self.evaluator is not None:
            self.evaluator.loader.workers = chosen.workers

    def samples_of(self, step: int) -> range:
        """Positions in the stream of the samples of step number `step` (from 0)."""
        batch = self.recipe.batch
        return range(step * batch, min((step + 1) * batch, self.total_samples))

    @property
    def evaluation_due(self) -> bool:
        """Every so many steps and at the end, once for each step, also if a stop request cut it short the last time."""
        step, every = self.state.step, self.recipe.evaluate.every
        due = step >= self.total_steps or (every is not None and step > 0 and step % every == 0)
        return due and self.state.evaluation.evaluated_step != step

    def measure(self, objective: Measure | None = None, evaluator: Evaluator | None = None) -> dict[str, float] | None:
        """Loss and metrics of the validation data with the weights as they are; None if a stop request came."""
        whole = self.step.measure if isinstance(self.step, PipelineStep) else self.objective
        objective, evaluator = objective or whole, evaluator or self.evaluator
        assert objective is not None
        assert evaluator is not None
        loader, batches = evaluator.loader, evaluator.batches
        try:
            on_batch = self.watch.where.batch
            return evaluate(self.model, objective, loader, batches, self.numbers, self.world, self.stop, on_batch)
        finally:
            let_go(self.model)

    def evaluate(self, objective: Measure | None = None, evaluator: Evaluator | None = None) -> dict[str, float] | None:
        """An evaluation that counts: recorded, and noted for early stopping and the best checkpoint."""
        self.watch.where.enter("evaluating")
        self.meet()
        began = time.monotonic()
        try:
            results = self.measure(objective, evaluator)
        except GradusError as error:
            saved = self.saving.committed
            kept = "nothing is saved yet" if saved is None else f"training is saved up to step {saved}"
            if not error.message.startswith("run.evaluate"):  # which says where it happened
                error.message = f"in the evaluation after step {self.state.step} ({kept}): {error.message}"
                error.args = (error.message,)
            raise
        if results is not None:
            self.recorder.evaluation(self.state.step, results, time.monotonic() - began)
            self.state.evaluation.note(self.state.step, results, self.recipe.evaluate)
            self.watch.where.enter("hooks")
            self.hooks.on_evaluate(results)
        self.recorder.restart_clock()
        return results

    def _commit_to_come(self) -> Path | None:
        """The file that will say that the checkpoint which is being written is complete."""
        step = self.saving.being_written
        return None if step is None else self.store.path(step) / COMMITTED

    def meet(self) -> None:
        """Before an evaluation or a checkpoint: one model on all ranks, buffers included. All ranks must call it."""
        if self.local_sgd is not None:
            self.local_sgd.meet()
        share_buffers(self.model, self.world)

    def evaluator_for(self, data: Indexed) -> Evaluator:
        samples = data.length
        if self.recipe.evaluate.batches is not None:
            samples = min(samples, self.recipe.evaluate.batches * self.recipe.batch)
        at_once = self.plan.micro_batch * self.plan.mesh.data_ranks
        # In an order of their own: the first few as they lie may all be of one class or from one text.
        return Evaluator(self._loader(data, at_once, samples, 1, EVALUATION_ORDER), math.ceil(samples / at_once))

    def some_rank_may_pad(self) -> bool:
        """With a micro-batch of samples missing from the last step, some rank has only padding there."""
        if not self.total_samples:
            return self.recipe.steps is None
        return self.total_steps * self.recipe.batch - self.total_samples >= self.plan.micro_batch

    def _make_loader(self) -> None:
        recipe, accumulate = self.recipe, self.plan.accumulate
        self.loader = self._loader(
            self.train_data, recipe.batch, self.total_samples, accumulate, recipe.seed, self.order
        )

    def position(self, samples: int) -> DataPosition:
        """Where in the stream the run is after so many samples."""
        hashed = specification_hash(self.specification)
        return DataPosition(self.recipe.seed, samples, self.state.skipped_positions, hashed)

    def _loader(
        self, data: Indexed, batch: int, total: int, accumulate: int, seed: int, order: Order | None = None
    ) -> Loader:
        slices = Slices(
            batch=batch,
            micro_batch=self.plan.micro_batch,
            accumulate=accumulate,
            data_rank=self.world.data_rank,
            total_samples=total,
            skipped=self.state.skipped_positions if order is not None else (),
        )
        return Loader(
            data,
            slices,
            self.world.device,
            self.numbers.parameters,
            seed=seed,
            order=order,
            workers=0 if self.plan.workers == "auto" else self.plan.workers,
            timeout_seconds=seconds_of(self.recipe.data.timeout) if self.recipe.data.timeout else None,
            on_device=self.plan.data_on_device,
            channels_last=self.plan.channels_last,
            part_of=partial(split_sequence, world=self.world) if self.plan.mesh.context > 1 else None,
            copying=self.watch.own.inside("host_to_device"),
        )


def _cluster_of(run: RunDirectory, attempt: int) -> Cluster | None:
    """What the attempt's files say about where it runs."""
    file = run.attempt_path(attempt) / "cluster.yaml"
    return Cluster.load(file) if file.exists() else None
