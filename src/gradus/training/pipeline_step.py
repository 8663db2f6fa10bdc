"""One optimizer step through a pipeline: its forwards and backwards go by torch's schedule, the rest is any step's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gradus.data.loader import MicroBatch
from gradus.parallel.averaging import average_
from gradus.parallel.batch_norm import has_batch_norm
from gradus.parallel.pipeline import ForwardOnly, StagesHere, run_schedule, scheduled, tied_group
from gradus.parallel.replicate import averaging_group, broadcast
from gradus.parallel.wiring import REFERENCE_PARTS, Wiring, traced
from gradus.parallel.world import World
from gradus.schema.errors import GradusError, InputError
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe
from gradus.training.accumulation import NARROW
from gradus.training.gradients import local
from gradus.training.objective import Losses, Objective
from gradus.training.out_of_memory import is_out_of_memory
from gradus.training.precision import Numbers
from gradus.training.randomness import seed_for_micro_batch
from gradus.training.step import TrainingStep, above_zero


def wiring_of(model: nn.Module, recipe: Recipe, plan: Plan, objective: Objective, example: Any) -> Wiring:
    """Where a model may be cut, before anything about it is changed. Of `example`, a batch, only the shapes matter."""
    if has_batch_norm(model):
        raise InputError(
            f"plan.mesh.pipeline: found {plan.mesh.pipeline}, but the model has batch normalisation, whose statistics "
            "are those of the whole batch and not of a micro-batch",
            hint="use plan.mesh.replicate or plan.mesh.shard",
            field="plan.mesh.pipeline",
            found=plan.mesh.pipeline,
            allowed=1,
        )
    return traced(model, recipe.pipeline_parts or REFERENCE_PARTS, objective.answer, example)


class PipelineStep(TrainingStep):
    """A step whose micro-batches go through the stages of a pipeline, `accumulate` of them at a time."""

    def __init__(
        self,
        model: StagesHere,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        numbers: Numbers,
        world: World,
        plan: Plan,
        *,
        clip: float | None,
        seed: int,
        on_nan: str = "stop",
    ) -> None:
        super().__init__(
            model,
            optimizer,
            objective,
            numbers,
            world,
            accumulate=plan.accumulate,
            clip=clip,
            seed=seed,
            accumulate_in_fp32=False,
            on_nan=on_nan,
        )
        self._stages, self._plan, self._measured_by = model.pipeline_cut.stages, plan, objective
        self._sharded = any(isinstance(stage, FSDPModule) for stage in self._stages)
        _check_formats(self._parameters, plan, sharded=self._sharded)
        # What a rank divides its losses by: a number that all stages know without asking, corrected at the end.
        self.micro_batch = plan.micro_batch
        self._share = float(plan.micro_batch * plan.accumulate)
        self._forward_only = ForwardOnly(self._stages, world)
        self._schedule: Any = None  # made with the first micro-batch, which tells what travels
        self._shapes: dict[Any, Any] = {}
        self._metrics: list[str] | None = None  # names, which only the last stage finds out by itself
        self._copies = _Copies(model, world)
        self._uncounted = self._copies.uncounted
        if not self._sharded:
            broadcast([*model.parameters(), *model.buffers()], averaging_group(world))
        self._copies.agree()

    def _accumulated(self, micro_batches: Iterator[MicroBatch], step: int) -> None:
        if self._guard is not None:
            self._guard.begin()
        ready = [self._filled(next(micro_batches), step) for _ in range(self.accumulate)]
        try:
            if self._schedule is None:
                self._schedule = self._scheduled(ready[0])
            with self._timed("backward"):  # stages' forwards are in between, and say so
                run_schedule(self._schedule, ready)
        except RuntimeError as error:
            raise _explained(error) from error
        with self._timed("backward"):
            if not self._sharded and self._world.averaging_ranks > 1:
                gradients = [p.grad for p in self._parameters if p.grad is not None]
                average_(gradients, averaging_group(self._world), self._plan.bucket_mib, self._plan.compression)
            self._copies.sum_gradients()

    def _finished_sums(self) -> tuple[Tensor, Tensor, Tensor | None]:
        nothing = torch.zeros((), dtype=torch.float64, device=self._world.device)
        losses, counts = sum(self._losses, nothing), sum(self._counts, nothing)
        self._losses, self._counts = [], []
        loss_sum, count = self._over_ranks(losses, counts)
        correction = self._share * self._world.averaging_ranks / above_zero(count, 1.0)
        return loss_sum, count, correction.to(self._numbers.parameters)

    def warm_up(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Nothing to do: gradients are added up over ranks in the same order from the first step on."""

    def measure(self, model: nn.Module, batch: Any, samples: int) -> Losses:
        """In place of the objective in evaluations: sums of the last stage there, and zeros on other ranks."""
        micro = _StagedMicroBatch(self, MicroBatch(batch, samples, 0), batch, None)
        try:
            self._forward_only(micro)
        except RuntimeError as error:
            raise _explained(error) from error
        if self._metrics is None:
            names = [list(micro.losses.metrics) if micro.losses else None]
            ways = self._world.mesh.pipeline
            dist.broadcast_object_list(names, group=self._world.submesh("pipeline").get_group(), group_src=ways - 1)
            self._metrics = names[0]
            assert self._metrics is not None
        if micro.losses is not None:
            return micro.losses
        zero = torch.zeros((), device=self._world.device)
        return Losses(zero, zero, dict.fromkeys(self._metrics, (zero, zero)))

    @torch.no_grad()
    def _scheduled(self, micro: _StagedMicroBatch) -> Any:
        """The schedule for stages that pass on what they pass on for this micro-batch."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()  # nothing may be learnt from this, such as averages that forward keeps
        try:
            self._forward_only(micro.without_gradients())
            self._forward_only.wait()
        finally:
            for module in training:
                module.training = True
        plan = self._plan
        flows = self._forward_only.flows
        return scheduled(self._stages, flows, plan.pipeline_schedule, self.accumulate, self._world)

    def _filled(self, micro: MicroBatch, step: int) -> _StagedMicroBatch:
        """A micro-batch of full size, so that stages pass on what they always do.

        All ranks of a pipeline have the same micro-batches: they refuse one here, before any sends or waits.
        """
        inputs = _filled(micro.inputs, max(1, micro.samples), self._plan.micro_batch)
        shapes = {key: (tuple(t.shape), t.dtype) for key, t in _tensors(inputs)}
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            key = next(key for key in {**shapes, **self._shapes} if shapes.get(key) != self._shapes.get(key))
            raise InputError(
                f"data.use: with a pipeline all micro-batches have the same shapes; {key!r} was {self._shapes.get(key)}"
                f" in the first one and is {shapes.get(key)} now",
                hint="pad or cut samples to one length",
                field="data.use",
                found=shapes.get(key),
                allowed=self._shapes.get(key),
            )
        return _StagedMicroBatch(self, micro, inputs, step)

    @contextmanager
    def computing(self, micro: MicroBatch, step: int | None, stage: int) -> Iterator[None]:
        """What a stage's forward runs inside. Stages draw different numbers, else all would drop the same."""
        if step is not None:
            seed_for_micro_batch(self._seed, step, micro.position, self._world.device, stage, *self._part)
        counting = self._experts.counting(None if step is None else micro.samples)
        with self._timed("forward"), counting, self._numbers.computing(self._world.device):
            yield

    def _timed(self, kind: Literal["forward", "backward"]) -> AbstractContextManager[object]:
        return self.own.inside(kind) if self.own is not None else nullcontext()

    def lost(self, model: nn.Module, micro: MicroBatch) -> Losses:
        return self._measured_by(model, micro.inputs, micro.samples)

    def keep(self, losses: Losses) -> Tensor:
        """Count a micro-batch's losses; what is sent backward for it."""
        self._losses.append(losses.loss_sum.detach().double())
        self._counts.append(losses.count.double())
        return losses.loss_sum / self._share


class _StagedMicroBatch:
    """A micro-batch on its way through the stages. `step` is None where nothing is trained."""

    def __init__(self, owner: PipelineStep, micro: MicroBatch, inputs: Any, step: int | None) -> None:
        self._owner, self._micro, self.inputs, self._step = owner, micro, inputs, step
        self.losses: Losses | None = None

    def without_gradients(self) -> _StagedMicroBatch:
        return _StagedMicroBatch(self._owner, self._micro, self.inputs, None)

    def computing(self, stage: int) -> AbstractContextManager[object]:
        return self._owner.computing(self._micro, self._step, stage)

    def lost(self, stage: nn.Module, flow: Tensor, answer: Callable[[Tensor, Any], Any]) -> Tensor:
        if self.inputs is not self._micro.inputs:  # the loss sees real samples only
            if flow.shape[0] != self._owner.micro_batch:
                raise InputError(
                    f"pipeline_parts: the blocks return a tensor of shape {tuple(flow.shape)} for "
                    f"{self._owner.micro_batch} samples, allowed: samples first",
                    hint="let blocks work on tensors whose first dimension is the sample",
                    field="pipeline_parts",
                )
            flow = flow[: max(1, self._micro.samples)]
        model: Any = _Answering(stage, partial(answer, flow, self._micro.inputs))
        self.losses = self._owner.lost(model, self._micro)
        return self.losses.loss_sum if self._step is None else self._owner.keep(self.losses)


class _Answering:
    """The model as the objective sees it: called with a batch it answers, from what the last block has returned."""

    def __init__(self, stage: nn.Module, answer: Callable[[], Any]) -> None:
        self._stage, self._answer = stage, answer

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._answer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    @property
    def training(self) -> bool:
        return torch.is_grad_enabled()


class _Copies:
    """Parameters that first and last stage both hold: an embedding table that is the output layer as well."""

    def __init__(self, model: StagesHere, world: World) -> None:
        tied = model.pipeline_cut.tied
        anywhere = torch.tensor(len(tied), dtype=torch.int32)  # of the host, which gloo sends
        self._group = tied_group(world) if world.sum_(anywhere).item() else None
        named = dict(model.named_parameters())
        self._parameters = [named[name] for name in tied]
        in_first = world.place.pipeline == 0
        self.uncounted = frozenset() if in_first else frozenset(self._parameters)

    def agree(self) -> None:
        """Both begin with the values of the first stage."""
        if self._parameters:
            broadcast(self._parameters, self._group)

    def sum_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                dist.all_reduce(local(parameter.grad), group=self._group)


def _check_formats(parameters: list[nn.Parameter], plan: Plan, *, sharded: bool) -> None:
    narrow = [p for p in parameters if p.dtype in NARROW]
    if narrow and plan.accumulate > 1 and plan.accumulate_dtype == "fp32" and not sharded:
        raise InputError(
            f"plan.accumulate_dtype: found fp32, but {len(narrow)} of the model's parameters are {narrow[0].dtype}, "
            "and a pipeline adds gradients up in the format of the parameters",
            hint="use plan.accumulate_dtype=parameters, or keep the parameters in float32 with plan.precision=bf16",
            field="plan.accumulate_dtype",
            found="fp32",
            allowed="parameters",
        )


def _tensors(batch: Any) -> list[tuple[Any, Tensor]]:
    pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return [(key, value) for key, value in pairs if isinstance(value, Tensor)]


def _filled(batch: Any, rows: int, size: int) -> Any:
    """A short batch with its last sample repeated."""
    if rows == size:
        return batch

    def filled(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != rows:
            return value
        return torch.cat([value, value[-1:].expand(size - rows, *value.shape[1:])])

    if isinstance(batch, Mapping):
        return {key: filled(value) for key, value in batch.items()}
    return tuple(filled(value) for value in batch)


def _explained(error: BaseException) -> BaseException:
    """What happened inside a stage; torch wraps it in an error about the stage's arguments."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, GradusError) or is_out_of_memory(cause):
            return cause
        cause = cause.__cause__
    return error
