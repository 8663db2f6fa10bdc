"""LiveRun: everything that one rank holds while a run is alive, built from the recipe and the plan."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradus.checkpoint.state import collect, restore_model, restore_optimizer
from gradus.checkpoint.store import Checkpoint, CheckpointStore
from gradus.data.loader import Indexed, Loader, Slices
from gradus.faults.announcements import Announcements
from gradus.faults.stop_request import StopRequest
from gradus.hardware.catalogue import find_gpu, peak_flops
from gradus.parallel.batch_norm import has_batch_norm
from gradus.parallel.replicate import replicated, share_buffers, unwrapped
from gradus.parallel.world import World
from gradus.planner.resolve import check_model_fits_data
from gradus.record.directory import RunDirectory
from gradus.schema.callables import is_import_path
from gradus.schema.errors import GradusError, InputError
from gradus.schema.intervals import seconds_of
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe
from gradus.training.building import build_model, open_data
from gradus.training.compilation import compile_model
from gradus.training.evaluation import Progress
from gradus.training.objective import Objective
from gradus.training.optimizers import build_optimizer
from gradus.training.precision import Numbers, apply_backend_settings, numbers_for
from gradus.training.recorder import Rates, Recorder
from gradus.training.schedules import Schedule, learning_rate, scaled_peak
from gradus.training.step import TrainingStep

EVALUATION_ORDER = 0  # the key of the order in which validation samples are taken: the same for every run


@dataclass
class TrainingState:
    """What a checkpoint holds besides tensors. The data position is `step` itself: the order needs no state."""

    step: int = 0
    skipped_steps: list[int] = field(default_factory=list)  # fp16 overflows; the schedule does not count them
    evaluation: Progress = field(default_factory=Progress)

    def schedule_position(self) -> int:
        """Optimizer steps done, as far as is known when the next step starts: an overflow shows one step late."""
        return self.step - sum(skipped <= self.step - 2 for skipped in self.skipped_steps)

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> TrainingState:
        return cls(**{**document, "evaluation": Progress(**document["evaluation"])})


@dataclass
class Evaluator:
    loader: Loader
    batches: int


class LiveRun:
    def __init__(self, recipe: Recipe, plan: Plan, run: RunDirectory, attempt: int, world: World) -> None:
        self.recipe, self.plan, self.run, self.attempt, self.world = recipe, plan, run, attempt, world
        # First of all: its heartbeat shows that the run is alive while a large model is built or loaded.
        self.recorder = Recorder(run, attempt, world, recipe.log_every)
        try:
            self._open_data()
            self._build_model()
            self._prepare_boundaries()
            self._check_ranks_agree()
            self._resume()
        except BaseException as error:
            self.recorder.close(state="failed", last_error=str(error) or type(error).__name__)
            raise
        self._note_start()

    def _open_data(self) -> None:
        recipe, plan = self.recipe, self.plan
        self.numbers: Numbers = numbers_for(plan.precision, self.world.device)
        apply_backend_settings(self.numbers, recipe.deterministic)
        self.train_data = _required(open_data(recipe, "train"))
        source = self.train_data.source
        self.tokens_per_sample = source.tokens_per_sample if source else None
        check_model_fits_data(recipe, source.vocabulary if source else None, source.classes if source else None)
        self.total_samples, self.total_steps = self._budget(self.train_data.length)
        self.loader = self._loader(self.train_data, recipe.batch, self.total_samples, plan.accumulate, recipe.seed)
        self.evaluator = self._evaluator(open_data(recipe, "validation"))

    def _build_model(self) -> None:
        """In this order: build, check, lay out in memory, compile, replicate; the optimizer last."""
        recipe, plan, world = self.recipe, self.plan, self.world
        model = build_model(recipe, world.device, self.numbers.parameters)
        if has_batch_norm(model) and plan.accumulate > 1:
            raise InputError(
                f"plan.accumulate: found {plan.accumulate}, but the model has batch normalisation, whose statistics "
                "are those of the whole batch",
                hint=f"use plan.micro_batch={plan.micro_batch * plan.accumulate}, more ranks, or a smaller batch",
                field="plan.accumulate",
                found=plan.accumulate,
                allowed=1,
            )
        if plan.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.flops_per_sample = _flops_per_sample(model)
        self.objective = Objective(recipe, model)
        self.objective.check_metric(recipe.evaluate.metric, reference_model=not is_import_path(recipe.model.use))
        if plan.compile:
            compile_model(model)
        # With a micro-batch of samples missing from the last step, some rank has only padding there.
        some_rank_may_pad = self.total_steps * recipe.batch - self.total_samples >= plan.micro_batch
        wrapped = replicated(model, world, plan.bucket_mib, some_rank_may_pad=some_rank_may_pad)
        self.model: nn.Module = unwrapped(wrapped)
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        self.schedule: Schedule = learning_rate(recipe.optimizer, recipe.batch, self.total_steps)
        self.step = TrainingStep(
            wrapped,
            self.optimizer,
            self.objective,
            self.numbers,
            world,
            accumulate=plan.accumulate,
            clip=recipe.optimizer.clip,
            seed=recipe.seed,
        )

    def _prepare_boundaries(self) -> None:
        """What happens between steps: checkpoints, stop requests, announcements."""
        every = self.plan.checkpoint_every
        self.state = TrainingState()
        self.resumed_step: int | None = None
        self.store = CheckpointStore(self.run.checkpoints)
        self.stop = StopRequest(self.run.stop_file, self.world)
        self.announcements = Announcements(self.world)
        self.saves_by_clock = isinstance(every, str)
        self.checkpoint_seconds = seconds_of(every) if isinstance(every, str) else 0.0

    def _note_start(self) -> None:
        recorder, rates = self.recorder, self._rates()
        recorder.rates = rates
        recorder.status(step=self.state.step, steps_total=self.total_steps)
        start = {"step": self.state.step, "steps_total": self.total_steps, "ranks": self.world.size, **rates.mfu()}
        recorder.event("start", **start)
        _, scaling = scaled_peak(self.recipe.optimizer, self.recipe.batch)
        if scaling:
            recorder.event("learning-rate", message=scaling)

    def samples_of(self, step: int) -> range:
        """Positions in the stream of the samples of step number `step` (from 0)."""
        batch = self.recipe.batch
        return range(step * batch, min((step + 1) * batch, self.total_samples))

    def save(self, required: bool) -> bool:
        """A checkpoint of the present step, and whether it is there. Rank 0 writes; with replicas it holds everything.

        One that cannot be written in the middle of a run is reported, and training goes on; at its end there is no
        later one that would do.
        """
        share_buffers(self.model, self.world)
        try:
            if self.world.leads:
                self._write_checkpoint()
        except OSError as error:  # on rank 0 only, which is also the only one that would raise
            message = f"the checkpoint of step {self.state.step} cannot be written: {error}"
            self.recorder.problem("checkpoint-failed", message)
            if required:
                newest = max(self.store.steps(), default=None)
                kept = "there is none" if newest is None else f"the newest one is of step {newest}"
                raise GradusError(
                    f"{message}; {kept}", hint=f"make room in {self.run.path}, then go on with --resume"
                ) from error
            return False
        finally:
            self.recorder.restart_clock()
        return True

    def _write_checkpoint(self) -> None:
        tensors, optimizer_numbers = collect(self.model, self.optimizer)
        if self.step.loss_scale is not None:
            tensors |= {f"loss_scale.{name}": value for name, value in self.step.loss_scale.state().items()}
        state = {
            "training": self.state.document(),
            "optimizer": {"use": self.recipe.optimizer.use, **optimizer_numbers},
            "samples": min(self.state.step * self.recipe.batch, self.total_samples),
            "dataset_length": self.train_data.length,
        }
        saved = self.store.save(self.state.step, tensors, state)  # which has verified it: older ones may go
        best = self.state.evaluation.best_step if self.recipe.checkpoint.best else None
        self.store.prune(self.state.step, self.recipe.checkpoint.keep, also_keep=best)
        self.recorder.event("checkpoint", step=self.state.step, path=str(saved.path.relative_to(self.run.path)))

    def _resume(self) -> None:
        """Go on from the newest checkpoint that can be trusted, if there is one. Rank 0 decides which."""
        step = torch.full((), -1, dtype=torch.int64, device=self.world.device)
        newest = None
        if self.world.leads:
            newest, damaged = self.store.newest()
            for problem in damaged:
                self.recorder.event("fault", kind="damaged-checkpoint", message=problem.message)
            step.fill_(newest.step if newest else -1)
        if self.world.size > 1:
            dist.broadcast(step, src=0)
        if step.item() < 0:
            return
        checkpoint = newest or self.store.open(int(step.item()))  # rank 0 has read and verified it already
        self._check_same_data(checkpoint)
        tensors, optimizer = checkpoint.tensors(), checkpoint.state["optimizer"]
        restore_model(self.model, tensors)
        use = self.recipe.optimizer.use
        if optimizer["use"] == use:
            restore_optimizer(self.model, self.optimizer, tensors, optimizer, groups=is_import_path(use))
        else:
            self.recorder.event("resume", message=f"optimizer {use} starts anew; the run had {optimizer['use']} before")
        if self.step.loss_scale is not None and "loss_scale.scale" in tensors:  # else the run had another precision
            for name, value in self.step.loss_scale.state().items():
                value.copy_(tensors[f"loss_scale.{name}"])
        self.state = TrainingState.from_document(checkpoint.state["training"])
        self.resumed_step = self.state.step
        self.recorder.event("resume", step=self.state.step)

    def _check_same_data(self, checkpoint: Checkpoint) -> None:
        """The position in the stream is a step number; it must mean the same samples as when it was saved."""
        if checkpoint.step > self.total_steps:
            raise InputError(
                f"the run is at step {checkpoint.step} already, beyond its budget of {self.total_steps} now",
                hint=f"--set steps={checkpoint.step * 2}, or start a new run",
                field="steps",
                found=self.total_steps,
                allowed=f"at least {checkpoint.step}",
            )
        length, samples = checkpoint.state["dataset_length"], checkpoint.state["samples"]
        if length != self.train_data.length:
            raise InputError(
                f"data: the run began with {length} training samples, found {self.train_data.length}: their order "
                "would be another",
                hint="start a new run with the new data, or bring the old data back",
                field="data",
                found=self.train_data.length,
                allowed=length,
            )
        if samples < min(checkpoint.step * self.recipe.batch, self.total_samples):
            raise InputError(
                f"the run ended after {samples} samples with a short batch; going on would skip the samples that would "
                "have filled it",
                hint="start a new run with the larger budget",
                field="epochs",
            )

    def _check_ranks_agree(self) -> None:
        """Ranks that see another dataset or model would train on nonsense, or wait for each other for ever."""
        if self.world.size == 1:
            return
        facts = {
            "training samples": self.train_data.length,
            "steps": self.total_steps,
            "evaluation batches": self.evaluator.batches if self.evaluator else 0,
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }
        mine = torch.tensor(list(facts.values()), dtype=torch.int64, device=self.world.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(everyone, mine)
        for name, values in zip(facts, torch.stack(everyone).T.tolist(), strict=True):
            if len(set(values)) > 1:
                raise InputError(
                    f"the ranks do not agree on the number of {name}: {values}",
                    hint="the model and data callables must return the same on every rank",
                    found=values,
                )

    def _budget(self, length: int) -> tuple[int, int]:
        """Samples and steps of the whole run."""
        recipe = self.recipe
        if recipe.steps is not None:
            return recipe.steps * recipe.batch, recipe.steps
        if recipe.epochs is not None:
            samples = max(1, round(recipe.epochs * length))
            return samples, math.ceil(samples / recipe.batch)
        assert recipe.tokens is not None, "the recipe was checked"
        if not self.tokens_per_sample:
            raise InputError(
                f"tokens: {recipe.data.use} has no tokens to count",
                hint="give the budget in steps or epochs",
                field="tokens",
            )
        steps = math.ceil(recipe.tokens / (recipe.batch * self.tokens_per_sample))
        return steps * recipe.batch, steps

    def _loader(self, data: Indexed, batch: int, total: int, accumulate: int, seed: int) -> Loader:
        slices = Slices(
            batch=batch,
            micro_batch=self.plan.micro_batch,
            accumulate=accumulate,
            data_rank=self.world.data_rank,
            total_samples=total,
        )
        return Loader(
            data,
            slices,
            self.world.device,
            self.numbers.parameters,
            seed=seed,
            workers=self.plan.workers,
            on_device=self.plan.data_on_device,
            channels_last=self.plan.channels_last,
        )

    def _evaluator(self, data: Indexed | None) -> Evaluator | None:
        if data is None:
            return None
        samples = data.length
        if self.recipe.evaluate.batches is not None:
            samples = min(samples, self.recipe.evaluate.batches * self.recipe.batch)
        at_once = self.plan.micro_batch * self.plan.mesh.data_ranks
        # In an order of their own: the first few as they lie may all be of one class or from one text.
        return Evaluator(self._loader(data, at_once, samples, 1, EVALUATION_ORDER), math.ceil(samples / at_once))

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


def _required(data: Indexed | None) -> Indexed:
    if data is None:
        raise InputError("data.use: there are no training samples", field="data.use", found=0, allowed="at least 1")
    return data


def _flops_per_sample(model: nn.Module) -> float | None:
    count = getattr(model, "flops_per_sample", None)
    return float(count()) if callable(count) else None
