"""Tracing: a model's forward and backward pass on fake tensors, as CUDA would run it, on a machine with no GPU."""

from __future__ import annotations

import gc
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # private, but there is no other that runs without a device
from torch.utils._pytree import tree_map

from gradus.parallel.blocks import repeated_blocks
from gradus.planner.profile.as_cuda import AsCuda
from gradus.planner.profile.cuda_attention import let_documents_be
from gradus.planner.profile.expected import as_expected
from gradus.planner.profile.ghosts import Block, watched
from gradus.planner.profile.recording import Recorder
from gradus.planner.profile.workspace import (
    Direction,
    attention_workspace_bytes,
    convolution_workspace_bytes,
    reduction_workspace_bytes,
)

LossOf = Callable[[nn.Module, Any, int], Tensor]  # of a model, a batch and its number of samples: the loss to minimise


@dataclass(frozen=True)
class Numbers:
    """What is computed in which format, and by what."""

    autocast: torch.dtype | None
    narrow_parameters: bool  # parameters are in the autocast format already, as sharded ones are when gathered
    tf32: bool = False
    capability: tuple[int, int] = (9, 0)
    fused_attention: bool = True  # False: the software of 2021


class FakeModel:
    """A model whose parameters and buffers are fake, in place. It has no memory, and runs as if it were on a GPU."""

    def __init__(self, model: nn.Module, numbers: Numbers, styles: Mapping[str, str], experts: frozenset[str]) -> None:
        self.model = model
        self.numbers = numbers
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.mode.capability = numbers.capability  # type: ignore[attr-defined]  # for models that ask their device
        self.looked_at_numbers = False  # in a trace, which has none: what it makes of them need not be what a run does
        self._styles = styles  # of layers that a tensor group divides, by name
        self._experts = experts  # names of modules whose parameters belong to experts
        if numbers.fused_attention:
            let_documents_be(model)
        made: dict[int, Any] = {}
        with self.mode:
            for module in model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[name] = made.setdefault(id(parameter), self._parameter(parameter))
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = made.setdefault(id(buffer), _fake(buffer, buffer.dtype))
        names = {module: name for name, module in model.named_modules()}
        self._blocks = [Block.of(names[block], block) for block in repeated_blocks(model)]

    def _parameter(self, parameter: Tensor) -> Any:
        dtype = parameter.dtype
        if self.numbers.narrow_parameters and self.numbers.autocast is not None and dtype == torch.float32:
            dtype = self.numbers.autocast
        return nn.Parameter(_fake(parameter, dtype), requires_grad=parameter.requires_grad)

    def trace(self, batch: Any, samples: int, loss_of: LossOf, *, ghosts: bool = True) -> Recorder:
        """One pass with a batch, of which only the shapes matter. Without `ghosts`, each of its blocks is run."""
        recorder = Recorder(self._expected, partial(self._workspace, samples))
        numbers = self.numbers
        as_cuda = AsCuda(numbers.autocast, numbers.capability, numbers.fused_attention)
        collects = gc.isenabled()
        gc.disable()  # what a collection frees would seem to go at that moment
        try:
            with ExitStack() as stack:
                stack.enter_context(self.mode)
                fake = tree_map(lambda x: _fake(x, x.dtype) if isinstance(x, Tensor) else x, batch)
                self._add_parameters(recorder)
                stack.enter_context(watched(self._blocks, recorder, ghosts=ghosts))
                stack.enter_context(recorder)
                stack.enter_context(as_cuda)
                stack.enter_context(_unnoticed())
                with as_cuda.forward(), recorder.naming(self.model):
                    loss = loss_of(self.model, fake, samples)
                recorder.begin_backward()
                loss.backward()  # type: ignore[no-untyped-call]
                self._note_gradients(recorder)
        finally:
            if collects:
                gc.enable()
            for parameter in self.model.parameters():
                parameter.grad = None
        return recorder

    def _expected(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        looks = getattr(func, "overloadpacket", func) is torch.ops.aten._local_scalar_dense
        self.looked_at_numbers |= looks and args[0].dtype != torch.bool
        return as_expected(func, args, kwargs)

    def _workspace(
        self, samples: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Iterator[tuple[int, float]]:
        """Bytes that an operator asks for while it runs, and from how many samples of a micro-batch on.

        As many answers for any number of samples: what is not needed has no bytes.
        """
        if name == "convolution":
            yield self._of_convolution(args[0], args[1], out, args[8], "forward"), 0.0
        elif name == "convolution_backward":
            # One after the other: the larger counts.
            ways: tuple[Direction, ...] = ("input", "weight")
            yield (
                max(
                    self._of_convolution(args[1], args[2], args[0], args[9], way) if wanted else 0
                    for way, wanted in zip(ways, args[10][:2], strict=True)
                ),
                0.0,
            )
            if args[10][2]:  # the gradient of a bias
                yield self._of_sum(args[0], [n for n in range(args[0].ndim) if n != 1], samples)
        elif name == "native_layer_norm":
            yield _bytes_to_copy(args[:1]), 0.0
        elif name == "native_layer_norm_backward":
            yield _bytes_to_copy(args[:2]), 0.0
        elif name == "sum" and len(args) > 1 and args[1]:
            yield self._of_sum(args[0], args[1], samples)
        elif attention := re.fullmatch(r"_scaled_dot_product_(flash|efficient|cudnn)_attention_backward", name):
            q, k = args[1], args[2]
            number, heads, queries, width = q.shape
            kernel: Any = attention[1]
            yield (
                attention_workspace_bytes(
                    kernel, number, heads, k.shape[1], queries, k.shape[2], width, q.element_size()
                ),
                0.0,
            )

    def _of_sum(self, x: Tensor, dims: Sequence[int], samples: int) -> tuple[int, float]:
        """Of a sum over rows. Along them, where numbers lie side by side, it needs next to nothing."""
        summed = {dim % x.ndim for dim in dims}
        inner = min(
            (dim for dim in range(x.ndim) if x.shape[dim] > 1), key=lambda dim: (x.stride(dim), -dim), default=0
        )
        if inner in summed or x.numel() == 0:
            return 0, 0.0
        rows = math.prod(x.shape[dim] for dim in summed)
        size, from_rows = reduction_workspace_bytes(x.numel() // rows, self.numbers.capability)
        return size, from_rows * samples / rows

    def _of_convolution(self, x: Tensor, weight: Tensor, result: Tensor, groups: int, way: Direction) -> int:
        """Of cuDNN, and copies that torch makes first of what does not lie as the convolution is done."""
        channels_last = x.ndim == 4 and any(map(_lies_channels_last, (x, weight)))
        wanted = torch.channels_last if channels_last else torch.contiguous_format
        used = {"forward": (x, weight), "input": (result, weight), "weight": (result, x)}[way]
        return _bytes_to_copy(used, wanted) + convolution_workspace_bytes(
            tuple(x.shape),
            tuple(weight.shape),
            tuple(result.shape),
            x.dtype,
            channels_last,
            groups,
            way,
            self.numbers.capability,
            self.numbers.tf32,
        )

    def _add_parameters(self, recorder: Recorder) -> None:
        for module_name, module in self.model.named_modules():
            style = self._styles.get(module_name)
            expert = module_name in self._experts
            for parameter in module._parameters.values():
                if parameter is not None:
                    divided = style if style and style.startswith(("colwise", "rowwise", "vocabulary")) else None
                    piece = recorder.add(parameter)
                    piece.layer, piece.expert = piece.layer or divided, piece.expert or expert
                    piece.table = piece.table or isinstance(module, nn.Embedding)
            for buffer in module._buffers.values():
                if buffer is not None:
                    recorder.add(buffer)

    def _note_gradients(self, recorder: Recorder) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None and (piece := recorder.piece(parameter.grad)) is not None:
                piece.role = "gradient"


def _bytes_to_copy(tensors: Iterable[Tensor], layout: torch.memory_format = torch.contiguous_format) -> int:
    """Of those that do not lie as a kernel wants them: it gets a copy, which goes when it is done."""
    return sum(t.numel() * t.element_size() for t in tensors if not t.is_contiguous(memory_format=layout))


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Inside, Hugging Face's models take fake tensors for real ones.

    Otherwise they build masks for attention, which they leave out where, on looking, nothing is masked
    (transformers/masking_utils.py).
    """
    asks = sys.modules.get("transformers.utils.import_utils")
    known = getattr(asks, "is_fake_tensor", None)
    if known is None:
        yield
        return
    setattr(asks, "is_fake_tensor", lambda x: False)  # noqa: B010
    try:
        yield
    finally:
        setattr(asks, "is_fake_tensor", known)  # noqa: B010


def _lies_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
