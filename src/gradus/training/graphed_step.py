"""Graphed step: forward, backward and update of one GPU, each recorded once and from then on launched as a whole.

A small model is done with its kernels before the host has launched the next: its step takes as long as Python does.
A recorded graph takes one launch. Three of them, not one, so that it stays known where the time of a step goes.

What is recorded reads the same memory each time: batches are copied to where the first one was, learning rates and the
seed of dropout are read from the device, and numbers are sent to the host after the last launch. A batch of another
shape, such as a short last one, is computed without a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradus.data.loader import MicroBatch
from gradus.data.transfer import mapped
from gradus.record.format import first_line
from gradus.training.readback import PendingNumbers
from gradus.training.step import TrainingStep

# Before a recording: compilers, libraries and the optimizer make in the first steps what must be there.
STEPS_BEFORE = 3


@dataclass(frozen=True)
class _Recording:
    inputs: list[Tensor]  # which the graphs read
    shape: object
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    update: torch.cuda.CUDAGraph
    rates: list[Tensor]  # of the optimizer's groups
    names: list[str]  # of what a step comes to
    values: Tensor


class GraphedStep(TrainingStep):
    """A step of a recipe, or of an own loop that hands over its loss as a function."""

    tell: Callable[[str], None] | None = None  # whom, where it cannot be recorded
    measure: Callable[[Any], tuple[Tensor, Tensor]] | None = None  # an own loop's: sum and count of a batch's losses

    _recording: _Recording | None = None
    _alike = 0  # steps in a row whose batches had the same shape
    _last_shape: object = None
    _refused = False
    _pool: Any = None

    @property
    def is_recorded(self) -> bool:
        return self._recording is not None

    def run(
        self, micro_batches: Iterator[MicroBatch], step: int, lr: float | None, measure_norm: bool
    ) -> PendingNumbers:
        micro = next(micro_batches)
        shape = _shape(micro)
        if self._recording is None and not self._refused and self._due(shape):
            self._record(micro, step, shape)
        if self._recording is None or self._recording.shape != shape:
            return super().run(iter([micro]), step, lr, measure_norm)
        return self._launch(self._recording, micro, step, lr)

    def _due(self, shape: object) -> bool:
        self._alike = self._alike + 1 if shape == self._last_shape else 0
        self._last_shape = shape
        return self._alike >= STEPS_BEFORE

    def _lost(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return super()._lost(micro) if self.measure is None else self.measure(micro.inputs)

    def _launch(self, recording: _Recording, micro: MicroBatch, step: int, lr: float | None) -> PendingNumbers:
        self._seed_for(micro, step)
        if self._narrow is not None:
            self._refresh_narrow()
        torch._foreach_copy_(recording.inputs, _tensors(micro.inputs))
        recording.forward.replay()
        with self.own.backward() if self.own is not None else nullcontext():
            recording.backward.replay()
        if self.own is not None:
            self.own.where.enter("optimizer")
        if lr is not None:
            self._set_rates(lr)
        self._pass_on_rates(recording.rates)
        recording.update.replay()
        return self._readback.send(recording.names, recording.values)

    def _set_rates(self, lr: float) -> None:
        """Rounded as a graph has them: a run that goes on without one for a few steps must do the same."""
        super()._set_rates(lr)
        for group in self.optimizer.param_groups:
            group["lr"] = float(np.float32(group["lr"]))

    def _pass_on_rates(self, rates: list[Tensor]) -> None:
        if self._one_pass is not None:
            self._one_pass.set_rates()
            return
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            rate.fill_(group["lr"])

    def _record(self, micro: MicroBatch, step: int, shape: object) -> None:
        """Nothing of this is computed: the step itself is the first launch."""
        kept = micro._replace(inputs=mapped(micro.inputs, torch.clone))
        own, self.own = self.own, None  # whose events would be recorded, too
        self.is_recording, stream = True, torch.cuda.current_stream(self._world.device)
        try:
            self._recording = self._recorded(kept, step, shape)
        except (RuntimeError, AssertionError, TypeError, ValueError) as error:  # for what cannot be recorded
            self._refused = True
            self._forget_step(stream)
            if self.tell is not None:
                self.tell(f"the step cannot be launched as graphs, and is launched as ever: {first_line(error)}")
        finally:
            self.own, self.is_recording = own, False

    def _recorded(self, micro: MicroBatch, step: int, shape: object) -> _Recording:
        graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
        stream = torch.cuda.Stream(self._world.device)  # type: ignore[no-untyped-call]
        # One for all: backward finds there what forward left, and the update the gradients.
        self._pool = pool = torch.cuda.graph_pool_handle()

        def recorded(graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
            # Other threads go on meanwhile: they load data, and write checkpoints.
            return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")

        # What a recording cannot have inside: seeds are set, and tables filled, by the host.
        self._seed_for(micro, step)
        if self._narrow is not None:
            self._refresh_narrow()
        if self._one_pass is not None:
            self._one_pass.expect_recording()
        with recorded(graphs[0]), self.forward(micro, step):
            loss_sum, count = self._lost(micro)
        with recorded(graphs[1]):
            self.backward(loss_sum, count)
        del loss_sum, count
        with _rates_on_device(self.optimizer, self._world.device) as rates, recorded(graphs[2]):
            numbers = self._updated(measure_norm=True)
            values = torch.stack(list(numbers.values()))
        if self._one_pass is not None:
            self._one_pass.settle()
        return _Recording(_tensors(micro.inputs), shape, graphs[0], graphs[1], graphs[2], rates, list(numbers), values)

    def _seed_for(self, micro: MicroBatch, step: int) -> None:
        if not torch.cuda.is_current_stream_capturing():
            super()._seed_for(micro, step)

    def _refresh_narrow(self, *, first: bool = True) -> None:
        if not torch.cuda.is_current_stream_capturing():  # whether it is needed differs from step to step
            super()._refresh_narrow(first=first)

    def _forget_step(self, stream: torch.cuda.Stream) -> None:
        """After a recording that failed, of which torch leaves things as they were in it: its stream, random numbers
        that may not be drawn outside of it, and an allocator that keeps all that is freed. `stream` was there before.
        """
        device = self._world.device
        torch.cuda.set_stream(stream)
        with contextlib.suppress(AttributeError, RuntimeError):  # seeds are set for each micro-batch anyway
            torch.cuda.default_generators[device.index or 0].graphsafe_set_state(torch.Generator(device))
        with contextlib.suppress(AttributeError, RuntimeError):  # unless the recording came to its end
            torch._C._cuda_endAllocateToPool(device.index or 0, self._pool)
        self._losses, self._counts = [], []
        self.abandon()
        self._clear_gradients()


@contextmanager
def _rates_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[list[Tensor]]:
    """Inside, the optimizer takes its learning rates from these tensors, in place of constants."""
    before = [(group["lr"], group.get("capturable")) for group in optimizer.param_groups]
    rates = [torch.full((), float(lr), dtype=torch.float32, device=device) for lr, _ in before]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"], group["capturable"] = rate, True
    try:
        yield rates
    finally:
        for group, (lr, capturable) in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr
            if capturable is None:
                del group["capturable"]
            else:
                group["capturable"] = capturable


def _tensors(inputs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(inputs, found.append)
    return found


def _shape(micro: MicroBatch) -> object:
    """What must not change from step to step: shapes, and whatever is no tensor."""
    return micro.samples, mapped(micro.inputs, lambda tensor: (tensor.shape, tensor.dtype, tensor.stride()))
