"""pipeline: consecutive blocks of a model on consecutive ranks, micro-batches one after the other through all of them.

| schedule    | torch's                       | stages per rank | order on a rank                                     |
|-------------|-------------------------------|-----------------|-----------------------------------------------------|
| gpipe       | ScheduleGPipe                 | 1               | all forwards, then all backwards                    |
| 1f1b        | Schedule1F1B                  | 1               | each backward as soon as it can be                  |
| interleaved | ScheduleInterleaved1F1B       | 2 or more       | the same over several stages                        |
| zero-bubble | ScheduleInterleavedZeroBubble | 1 or more       | backward in two halves, the second whenever there   |
|             |                               |                 | would be nothing to do                              |

Of torch's two zero-bubble schedules this one takes any number of stages per rank and deals them out as interleaved
does, so that a checkpoint's or a newcomer's idea of who holds which blocks is one and the same. ZBV is free of idle
time only if forward and both halves of backward take equally long.

A stage keeps the names that its parameters have in the whole model, so that checkpoints, optimizers and initialisation
need not know of stages. The model may be on the meta device when it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradus.parallel.layout import groups
from gradus.parallel.stages import balanced, check_enough_blocks, ranges, stages_of
from gradus.parallel.wiring import FIELD, Wiring
from gradus.parallel.world import World
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan

# torch.distributed.pipelining takes most of a second to import, which every rank of every run would spend: that is done
# where a pipeline is made.
SINGLE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
MULTI = {"interleaved": "ScheduleInterleaved1F1B", "zero-bubble": "ScheduleInterleavedZeroBubble"}


def over_stages(schedule: str, stages: Sequence[Any], micro_batches: int, **options: Any) -> Any:
    """torch's schedule of this name over a rank's stages."""
    from torch.distributed import pipelining

    if schedule in SINGLE:
        return getattr(pipelining, SINGLE[schedule])(stages[0], micro_batches, **options)
    return getattr(pipelining, MULTI[schedule])(stages, micro_batches, **options)


class InStages(Protocol):
    """A micro-batch as every stage gets it, whole: the flow is the only thing that travels."""

    @property
    def inputs(self) -> Any:
        """Of full size, so that what travels always has the same shape."""

    def computing(self, stage: int) -> AbstractContextManager[object]:
        """A stage's forward runs inside this."""

    def lost(self, stage: nn.Module, flow: Tensor, answer: Callable[[Tensor, Any], Any]) -> Tensor:
        """The loss to send backward, from what the last block returned; `answer` is the tail."""


@dataclass(frozen=True)
class StagePlace:
    """Which stage of a pipeline it is, and which blocks of the model it has."""

    number: int
    stages: int
    blocks: range
    wiring: Wiring

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.stages - 1


class Stage(nn.Module):
    """Some blocks in a row, the first stage with the head before them, the last one with the tail after them.

    Its other attributes are the model's parts, by the model's names.
    """

    def __init__(self, place: StagePlace) -> None:
        super().__init__()
        self.pipeline_place = place

    def forward(self, flow: Tensor | None = None, *, micro: InStages) -> Tensor:
        place, batch = self.pipeline_place, micro.inputs
        wiring = place.wiring
        with micro.computing(place.number):
            if place.is_first:
                flow = wiring.calls[0].made(self.get_submodule(wiring.parts.head), None, batch)
            elif flow is not None and flow.requires_grad:
                # Backward's result is sent as it lies in memory, which has to be in one piece.
                flow = flow.view_as(flow)
                flow.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
            for number in place.blocks:
                block = self.get_submodule(f"{wiring.parts.blocks}.{number}")
                flow = wiring.calls[1 + number].made(block, flow, batch)
            assert flow is not None
            if not place.is_last:
                return flow.contiguous()
            tail = self.get_submodule(wiring.parts.tail)
            return micro.lost(self, flow, partial(wiring.calls[-1].made, tail))


@dataclass(frozen=True)
class Cut:
    """How a model was cut into stages, and which of them are here."""

    stages: list[Stage]
    tied: list[str]  # names of parameters that first and last stage hold alike; on other ranks none
    counts: list[int]  # blocks of each stage of the whole pipeline
    trained: list[str]  # names of all parameters of the whole model that are trained


class StagesHere(nn.Module):
    """All that a rank holds of a model that was cut: a tree of the model's own modules, by the names of the whole."""

    pipeline_cut: Cut

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.pipeline_cut = cut  # the stages in it are no children, whose names would come before those of the model

    def modules(self) -> Iterator[nn.Module]:  # type: ignore[override]
        """The stages as well: FSDP2 makes each of them a module that gathers parameters."""
        yield from super().modules()
        yield from self.pipeline_cut.stages

    def _apply(self, *args: Any, **named: Any) -> StagesHere:
        # What `to` goes through. FSDP2's modules, the stages, have to see their parameters change.
        for stage in self.pipeline_cut.stages:
            stage._apply(*args, **named)  # type: ignore[no-untyped-call]
        return self

    def forward(self, *args: Any, **named: Any) -> Any:
        raise AssertionError("a part of a model answers no batch: its stages are called in turn")


def cut(model: nn.Module, wiring: Wiring, plan: Plan, world: World) -> StagesHere:
    """This rank's part of a model, made of the model's own modules. All ranks must cut the same model."""
    ways, per_rank = plan.mesh.pipeline, plan.stages_per_rank
    count = ways * per_rank
    check_enough_blocks(wiring.blocks, ways, per_rank, plan.stage_blocks)
    head, *blocks, tail = wiring.costs
    counts = plan.stage_blocks or balanced(blocks, count, before=head, after=tail)
    spans = ranges(counts)
    paths = [[f"{wiring.parts.blocks}.{number}" for number in span] for span in spans]
    paths[0].insert(0, wiring.parts.head)
    paths[-1].append(wiring.parts.tail)
    here = stages_of(world.place.pipeline, ways, per_rank)
    at_an_end = not {0, count - 1}.isdisjoint(here)
    tied = _tied(model, paths)
    stages = [Stage(StagePlace(number, count, spans[number], wiring)) for number in here]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    part = StagesHere(Cut(stages, tied if at_an_end else [], list(counts), trained))
    for number, stage in zip(here, stages, strict=True):
        # A tied parameter comes first, so that it has its first name here as well.
        owners = [name.rpartition(".")[0] for name in tied] if number in (0, count - 1) else []
        outside = [path for path in owners if not any(f"{path}.".startswith(f"{known}.") for known in paths[number])]
        rest = _rest(model, wiring) if number == count - 1 else []
        saved = model.state_dict(keep_vars=True)  # without the buffers that are not to be saved
        for tree in (stage, part):
            for path in dict.fromkeys([*outside, *paths[number]]):
                _graft(tree, path, model.get_submodule(path))
            for path, what in rest:
                _graft(tree, path, what, persistent=path in saved)
    return part


def _tied(model: nn.Module, paths: Sequence[Sequence[str]]) -> list[str]:
    """Names of the parameters that first and last stage share; others may not share any."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    holders: dict[nn.Parameter, set[int]] = {}
    for number, stage in enumerate(paths):
        for path in stage:
            for parameter in model.get_submodule(path).parameters():
                holders.setdefault(parameter, set()).add(number)
    shared = {names[parameter]: numbers for parameter, numbers in holders.items() if len(numbers) > 1}
    last = len(paths) - 1
    for name, numbers in shared.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        if numbers != {0, last} or len(list(owner.parameters())) > 1:
            raise InputError(
                f"{FIELD}: stages {sorted(numbers)} of 0 to {last} share the parameter {name}, allowed: the first and "
                "the last stage, and a layer with nothing else in it",
                hint="a pipeline can tie an embedding table and an output layer, and nothing else",
                field=FIELD,
                found=name,
            )
    return list(shared)


def _rest(model: nn.Module, wiring: Wiring) -> list[tuple[str, nn.Module | Tensor]]:
    """What the model has beside its parts. The flow does not go through it, but checkpoints have it."""
    parts = [wiring.parts.head, wiring.parts.blocks, wiring.parts.tail]
    found: list[tuple[str, nn.Module | Tensor]] = []

    def walk(module: nn.Module, path: str) -> None:
        named = [*module.named_parameters(path, recurse=False), *module.named_buffers(path, recurse=False)]
        found.extend(named)
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            if any(part.startswith(f"{inner}.") for part in parts):
                walk(child, inner)
            elif inner not in parts:
                found.append((inner, child))

    walk(model, "")
    return found


def _graft(tree: nn.Module, path: str, what: nn.Module | Tensor, *, persistent: bool = True) -> None:
    """Hang a module, parameter or buffer into a tree of modules that have nothing but names."""
    *above, name = path.split(".")
    for step in above:
        if step not in tree._modules:
            tree.add_module(step, nn.Module())
        tree = tree.get_submodule(step)
    if isinstance(what, nn.Parameter):
        tree.register_parameter(name, what)
    elif isinstance(what, Tensor):
        tree.register_buffer(name, what, persistent=persistent)
    else:
        tree.add_module(name, what)


@dataclass(frozen=True)
class Flow:
    """Shape and format of what travels from a stage to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def example(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=True)


def scheduled(
    stages: Sequence[Stage],
    flows: Sequence[tuple[Flow | None, Flow]],
    schedule: str,
    micro_batches: int,
    world: World,
) -> Any:
    """torch's schedule over this rank's stages. `flows` are what each gets (None: the batch) and what it gives.

    They are given so that torch need not run the stages to find out, loss and backward included.
    """
    from torch.distributed.pipelining import PipelineStage

    group = world.submesh("pipeline").get_group()
    held = [
        PipelineStage(
            stage,
            stage.pipeline_place.number,
            stage.pipeline_place.stages,
            world.device,
            input_args=() if gets is None else (gets.example(),),
            output_args=(gives.example(),),
            group=group,
        )
        for stage, (gets, gives) in zip(stages, flows, strict=True)
    ]
    # The last stage computes the loss itself: it knows the micro-batch. Gradients are normalised by whoever steps.
    options: dict[str, Any] = {"loss_fn": lambda output, target: output, "scale_grads": False}
    return over_stages(schedule, held, micro_batches, **options)


def run_schedule(schedule: Any, micro_batches: Sequence[InStages]) -> None:
    """All forwards and backwards of a step.

    `step` would cut a whole batch by itself; `_step_microbatches`, what it calls then, takes ready micro-batches, each
    of which keeps its own number of samples and its position in the stream. What `step` does before is done here.
    """
    held = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    for stage in held:
        stage.has_backward = True
        stage.clear_runtime_states()
    count = len(micro_batches)
    named = [{"micro": micro} for micro in micro_batches]
    schedule._step_microbatches(arg_mbs=[()] * count, kwarg_mbs=named, target_mbs=[None] * count)
    for stage in held:
        stage.clear_runtime_states()  # the last outputs of each stage


class ForwardOnly:
    """Micro-batches through the stages without a schedule: for evaluation, where shapes may differ."""

    _DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    _HEADER = 12  # numbers: dtype, dimensions, sizes

    def __init__(self, stages: Sequence[Stage], world: World) -> None:
        self._stages, self._world = stages, world
        self._group = world.submesh("pipeline").get_group()
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self.flows: list[tuple[Flow | None, Flow]] = []  # of the last call

    def __call__(self, micro: InStages) -> Tensor | None:
        """What the last stage returned, where it is; None elsewhere."""
        result = None
        self.flows = []
        for stage in self._stages:
            place = stage.pipeline_place
            flow = None if place.is_first else self._received(place.number - 1)
            output: Tensor = stage(micro=micro) if flow is None else stage(flow, micro=micro)
            self.flows.append((None if flow is None else _flow_of(flow), _flow_of(output)))
            if place.is_last:
                result = output
            else:
                self._send(output.detach(), place.number + 1)
        return result

    def wait(self) -> None:
        """Until all that was sent has been taken."""
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self._sent = []

    def _rank_of(self, stage: int) -> int:
        return stage % self._world.mesh.pipeline

    def _send(self, flow: Tensor, to_stage: int) -> None:
        self.wait()
        numbers = [self._DTYPES.index(flow.dtype), flow.dim(), *flow.shape]
        header = torch.tensor(numbers + [0] * (self._HEADER - len(numbers)))  # of the host: read without the device
        for tensor in (header, flow):
            self._sent.append((dist.isend(tensor, group=self._group, group_dst=self._rank_of(to_stage)), tensor))

    def _received(self, from_stage: int) -> Tensor:
        header = torch.zeros(self._HEADER, dtype=torch.int64)
        source = self._rank_of(from_stage)
        dist.recv(header, group=self._group, group_src=source)
        number, dimensions, *sizes = header.tolist()
        flow = torch.empty(sizes[:dimensions], dtype=self._DTYPES[number], device=self._world.device)
        dist.recv(flow, group=self._group, group_src=source)
        return flow


def _flow_of(tensor: Tensor) -> Flow:
    return Flow(tuple(tensor.shape), tensor.dtype)


def tied_group(world: World) -> dist.ProcessGroup | None:
    """First and last rank of this rank's pipeline, if it is one of them. All ranks must call it."""
    mine = None
    for members in groups(world.mesh, ["pipeline"]):
        ends = [members[0], members[-1]]
        group = dist.new_group(ends)
        if world.rank in ends:
            mine = group
    return mine
