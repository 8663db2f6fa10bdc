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

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from gradus.checkpoint.part import COMMITTED
from gradus.checkpoint.store import Checkpoint, CheckpointStore
from gradus.data.loader import Indexed, Loader, Slices
from gradus.data.order import Order
from gradus.data.orders import note_of, order_for
from gradus.data.position import DataPosition, specification_hash, specification_of, with_skipped
from gradus.data.workers import loader_stacks
from gradus.faults.announcements import Announcements
from gradus.faults.deadline import deadline_of
from gradus.faults.stop_request import StopRequest
from gradus.faults.watch import Watch
from gradus.faults.watchdog import Patience
from gradus.hardware.catalogue import find_gpu, peak_flops
from gradus.hardware.rank_cores import cores_of_rank
from gradus.parallel.batch_norm import has_batch_norm
from gradus.parallel.case import refused
from gradus.parallel.context import split_sequence
from gradus.parallel.local_sgd import LocalSGD, check_can_step_alone
from gradus.parallel.pipeline import StagesHere
from gradus.parallel.recompute import recompute_note
from gradus.parallel.replicate import replicated, share_buffers, unwrapped
from gradus.parallel.shard import let_go
from gradus.parallel.support import accumulated_statistics
from gradus.parallel.wiring import Wiring
from gradus.parallel.world import World, alone
from gradus.planner.budget import between_failures, length_of
from gradus.planner.one_pass import in_one_pass
from gradus.planner.resolve import check_model_fits_data
from gradus.record.directory import RunDirectory
from gradus.record.variables import BIND, OWN
from gradus.schema.cluster import Cluster
from gradus.schema.errors import GradusError, InputError
from gradus.schema.intervals import seconds_of
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe
from gradus.training.accumulation import check_parameters_are_wide
from gradus.training.breakdown import Timings
from gradus.training.building import open_data
from gradus.training.described import Described, described_model
from gradus.training.evaluation import Measure, evaluate
from gradus.training.float8 import Float8Layers, choose_layers
from gradus.training.graphed_step import GraphedStep
from gradus.training.hooks import Hooks
from gradus.training.loss_placement import chunk_loss, may_chunk
from gradus.training.objective import Objective
from gradus.training.optimizers import build_optimizer
from gradus.training.out_of_memory import out_of_memory_explained
from gradus.training.own_optimizer import let_update_in_one_pass, rebind
from gradus.training.pipeline_step import PipelineStep, wiring_of
from gradus.training.precision import Numbers, apply_backend_settings, numbers_for
from gradus.training.preparation import prepared
from gradus.training.profiling import Bystander, Profiling
from gradus.training.recorder import Rates, Recorder
from gradus.training.resuming import bring_home, check_same_stream, newest_checkpoint, resumed, step_back
from gradus.training.rollback import check_can_recover, left_out_by_rollbacks
from gradus.training.save_interval import SaveInterval
from gradus.training.saving import Saving, local_tier
from gradus.training.schedules import Schedule, learning_rate, scaled_peak
from gradus.training.staged import staged_recipe
from gradus.training.step import TrainingStep
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
        self.announcements = Announcements(world)
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
            live.check_same_data_on_ranks()
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
        self.use_model(described)

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

    def use_model(
        self, described: Described, optimizer: torch.optim.Optimizer | None = None, *, fixed_buckets: bool = False
    ) -> None:
        """In this order: check, lay out in memory, split, fill with values, replicate; the optimizer last, unless it is
        there."""
        recipe, plan, world, model = self.recipe, self.plan, self.world, described.model
        if described.note:
            self.recorder.event("model", message=described.note)
        self.parameter_counts = parameter_counts(model)
        # Before the first collective over parameters, in which ranks with other ones would wait for ever.
        self._check_ranks_agree({"parameters": self.parameter_counts[0]})
        if has_batch_norm(model) and plan.accumulate > 1:
            raise accumulated_statistics("the model", plan)
        if plan.sharded and plan.accumulate > 1 and plan.accumulate_dtype == "fp32":
            check_parameters_are_wide(model)
        if plan.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.flops_per_sample = _flops_per_sample(model)
        may_pad = self._some_rank_may_pad()
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.may_chunk_loss = self.objective is not None and may_chunk(model, recipe)
        if plan.loss_chunks > 1:
            example = self._example() if self.objective is not None else None
            chunk_loss(model, plan.loss_chunks, self.objective, example)
        # Said in `begin`, of the whole model: a pipeline leaves this rank a part of it.
        self.recompute_note = recompute_note(model, plan)
        self.float8_layers = choose_layers(model, plan.fp8_scaling) if plan.precision == "fp8" else None
        wiring = self._wiring(model) if plan.mesh.pipeline > 1 else None
        wrapped = prepared(model, recipe, plan, world, self.numbers, some_rank_may_pad=may_pad, wiring=wiring)
        offloaded = torch.device("cpu") if plan.offload == "cpu" else None
        described.fill(wrapped, world, shards_on=offloaded)
        steps_alone = plan.synchronise_every > 1 and world.size > 1
        if steps_alone:
            check_can_step_alone(model, plan.synchronise_every, some_rank_may_pad=may_pad)
        elif world.averaging_ranks > 1 and not plan.sharded and plan.mesh.pipeline == 1:
            wrapped = replicated(
                wrapped,
                world,
                plan.bucket_mib,
                compression=plan.compression,
                some_rank_may_pad=may_pad,
                fixed_buckets=fixed_buckets,
            )
        self.model = unwrapped(wrapped)
        if optimizer is not None:
            if plan.cuda_graph:
                why = "the script has an optimizer of its own, whose numbers a recording would freeze"
                hint = "let the recipe name the optimizer, and call run.prepare(model)"
                raise refused("plan.cuda_graph", "true", why, allowed="false", hint=hint)
            rebind(optimizer, names, self.model)
        narrow = plan.narrow_weights and world.device.type == "cuda"
        if optimizer is not None and narrow and in_one_pass(plan, offered=recipe.on_nan != "skip"):
            let_update_in_one_pass(optimizer)
        self.optimizer = optimizer or build_optimizer(self.model, recipe.optimizer, narrow_weights=narrow)
        if steps_alone:
            self.local_sgd = LocalSGD(self.model, self.optimizer, world, plan.synchronise_every, plan.bucket_mib)
        if isinstance(wrapped, StagesHere):
            clip, seed = recipe.optimizer.clip, recipe.seed
            assert self.objective is not None
            self.step = PipelineStep(
                wrapped,
                self.optimizer,
                self.objective,
                self.numbers,
                world,
                plan,
                clip=clip,
                seed=seed,
                on_nan=recipe.on_nan,
            )
            self.step.own = self.watch.own
            return
        self.step = (GraphedStep if plan.cuda_graph else TrainingStep)(
            wrapped,
            self.optimizer,
            self.objective,
            self.numbers,
            alone(world.device) if steps_alone else world,
            accumulate=plan.accumulate,
            clip=recipe.optimizer.clip,
            seed=recipe.seed,
            zero=plan.zero,
            accumulate_in_fp32=plan.accumulate_dtype == "fp32",
            local_sgd=self.local_sgd,
            on_nan=recipe.on_nan,
            narrow_weights=plan.narrow_weights,
            others_write_weights=bool(recipe.hooks) or self.objective is None,
            narrow_in_calls=self.objective is None,
        )
        if isinstance(self.step, GraphedStep):
            self.step.tell = self.warn
        self.step.own = self.watch.own
        self.watch.own.watch_gradients(self.step.model)

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
        recorder, rates = self.recorder, self._rates()
        recorder.rates = rates
        recorder.status(step=self.state.step, steps_total=self.total_steps)
        start = {"step": self.state.step, "steps_total": self.total_steps, "ranks": self.world.size, **rates.mfu()}
        start |= {"device": self.world.device.type, "threads": torch.get_num_threads()}
        start |= {"parameters": self.parameter_counts[0]}
        recorder.event("start", **start)
        self.samples = TrainedSamples(self)
        if self.world.device.type == "cpu" and self.cluster is not None and self.cluster.gpus_per_node:
            promised = f"{self.cluster.gpus_per_node} × {self.cluster.gpu_name}" if self.cluster.gpu else "GPUs"
            message = f"trains on the CPU: {self.cluster.name} promises {promised} on each node, but there is none here"
            recorder.event("warning", message=message)
        total, trained = self.parameter_counts
        if trained < total:
            recorder.event("model", message=f"trains {trained:,} of {total:,} parameters")
        if self.recompute_note:
            recorder.event("recompute", message=self.recompute_note)
        if self.float8_layers is not None:
            recorder.event("precision", message=self.float8_layers.summary())
            for doubt in self.float8_layers.doubts(self._rows_at_once(), self.plan.compile):
                recorder.event("warning", message=doubt)
        note = getattr(self.train_data, "note", None)
        if note:
            recorder.event("data", message=note)
        if self.world.leads and (note := note_of(self.order, self.total_samples)):
            recorder.event("data", message=note)
        if self.plan.workers == "auto":
            self._choose_workers()
        _, scaling = scaled_peak(self.recipe.optimizer, self.recipe.batch)
        if scaling:
            recorder.event("learning-rate", message=scaling)

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

    def _some_rank_may_pad(self) -> bool:
        """With a micro-batch of samples missing from the last step, some rank has only padding there."""
        if not self.total_samples:
            return self.recipe.steps is None
        return self.total_steps * self.recipe.batch - self.total_samples >= self.plan.micro_batch

    def check_same_data_on_ranks(self) -> None:
        self._check_ranks_agree(
            {
                "training samples": self.train_data.length,
                "steps": self.total_steps,
                "evaluation batches": self.evaluator.batches if self.evaluator else 0,
            }
        )
        # As many samples need not be the same ones. 60 bits of the hash are a number that a tensor can hold.
        self._check_ranks_agree(
            {"specification": int(specification_hash(self.specification)[:15], 16)},
            "the data is not the same on all nodes; ranks that see other samples than rank 0: {ranks}",
            hint="compare the files under data.path on the nodes: their content, names and sizes",
        )

    def _check_ranks_agree(
        self,
        facts: dict[str, int],
        message: str = "the ranks do not agree on the number of {name}: {values}",
        hint: str = "the model and data callables must return the same on every rank",
    ) -> None:
        """Ranks that see another dataset or model would train on nonsense, or wait for each other for ever."""
        if self.world.size == 1:
            return
        mine = torch.tensor(list(facts.values()), dtype=torch.int64, device=self.world.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(everyone, mine)
        for name, values in zip(facts, torch.stack(everyone).T.tolist(), strict=True):
            if len(set(values)) > 1:
                others = ", ".join(str(rank) for rank, value in enumerate(values) if value != values[0])
                raise InputError(message.format(name=name, values=values, ranks=others), hint=hint, found=values)

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

    def _wiring(self, model: nn.Module) -> Wiring:
        """Where the model may be cut into stages, seen on a batch of one sample."""
        assert self.objective is not None, "own loops have no pipeline"
        return wiring_of(model, self.recipe, self.plan, self.objective, self._example())

    def _example(self) -> Any:
        """A batch of one sample, for its shapes."""
        raw = self.train_data.fetch(np.zeros(1, dtype=np.int64), self.recipe.seed)
        return self.train_data.finish(raw, self.numbers.parameters)

    def _rows_at_once(self) -> int | None:
        """How many tokens a layer of this rank sees in one micro-batch."""
        if self.tokens_per_sample is None:
            return None
        return self.plan.micro_batch * self.tokens_per_sample // self.plan.mesh.context

    def _rates(self) -> Rates:
        device = self.world.device
        gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        peak = peak_flops(gpu, self.plan.precision) if gpu else None
        return Rates(
            tokens_per_sample=self.tokens_per_sample,
            flops_per_sample=self.flops_per_sample,
            peak_flops=peak * self.world.size if peak else None,
            peak_source=f"{self.plan.precision} dense, {gpu.sources['peak_tflops']}" if gpu and peak else None,
        )


def _cluster_of(run: RunDirectory, attempt: int) -> Cluster | None:
    """What the attempt's files say about where it runs."""
    file = run.attempt_path(attempt) / "cluster.yaml"
    return Cluster.load(file) if file.exists() else None


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """All, and those that are trained."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def _flops_per_sample(model: nn.Module) -> float | None:
    count = getattr(model, "flops_per_sample", None)
    return float(count()) if callable(count) else None
