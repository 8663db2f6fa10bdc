"""As CUDA: a model on fake tensors of the CPU runs the operators that it would run on a GPU.

Where the two differ, a function is replaced before torch takes it apart: attention kernels, autocast, dropout, norms,
recurrent layers. What is called instead are the real operators, below autograd too, so that what is saved for backward
and what backward runs are those of CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradus.planner.profile import cuda_autocast
from gradus.planner.profile.cuda_attention import attend, attention_of
from gradus.planner.profile.cuda_kernels import ops, recurrent
from gradus.planner.profile.expected import note

aten = torch.ops.aten

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
# cuDNN's batch norm: batches above these sizes are for torch's own kernels (ATen/native/Normalization.cpp).
_CUDNN_BATCH_TRAINING, _CUDNN_BATCH_EVALUATION = 880_801, 65_535
_CUDNN_SMALLEST_EPS = 1e-5
_INT32 = 2**31


class AsCuda(TorchFunctionMode):
    """Around forward, loss and backward. `forward()` is the autocast region, which ends before backward."""

    def __init__(
        self,
        autocast: torch.dtype | None,
        capability: tuple[int, int],
        fused_attention: bool = True,
    ) -> None:
        super().__init__()
        self.autocast = autocast
        self.capability = capability
        self.fused_attention = fused_attention
        self._casts = cuda_autocast.Casts()
        self._depth = 0
        self._stack = ExitStack()
        self._within: Any = None  # the function in Python that is running; it may wrap one in C that has its name
        self._own: dict[str, Callable[..., Any]] = {
            "scaled_dot_product_attention": self._attention,
            "dropout": _dropout,
            "softmax": _softmax(aten._softmax),
            "log_softmax": _softmax(aten._log_softmax),
            "cross_entropy_loss": self._cross_entropy,
            "batch_norm": _batch_norm,
            "group_norm": _group_norm,
            "rms_norm": _rms_norm,
            "one_hot": _one_hot,
            "lstm_cell": _lstm_cell,
            "cuda": lambda func, args, kwargs, autocast: args[0],
            **dict.fromkeys(_GATES, self._recurrent),
        }

    def __enter__(self) -> AsCuda:
        if self._depth == 0:
            self._stack.enter_context(_autocast_of_cuda(self._casts.forget))
            self._stack.enter_context(_taken_for_real())
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if self._depth == 0:
            self._stack.close()
            self._casts.forget()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The autocast region that training code opens around forward and loss; there is none in full precision."""
        if self.autocast is None:
            yield
            return
        before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        _tell_cuda(True, self.autocast)  # for code that asks; it has no effect on tensors of the CPU
        try:
            with torch.autocast("cuda", dtype=self.autocast):
                yield
        finally:
            _tell_cuda(*before)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # .shape, .dtype and their like
            return func(*args, **kwargs)
        if isinstance(func, FunctionType) and func is not self._within and (body := _body(func)) is not None:
            outer, self._within = self._within, func
            try:
                with self:
                    return body(*args, **kwargs)
            finally:
                self._within = outer
        args, kwargs = _here(name, args, kwargs)
        called = args, kwargs
        with ExitStack() as stack:
            inside = cuda_autocast.is_on()
            if inside:  # that of the CPU has other lists
                stack.enter_context(torch._C._DisableAutocast())
                called = self._cast(name, args, kwargs)
            own = self._own.get(name)
            result = func(*called[0], **called[1]) if own is None else own(func, *called, inside)
        note(name, args, kwargs, result)
        return result

    def _cast(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        casted, more = self._casts.arguments(name, args, kwargs)
        return tuple(casted), more

    # --- functions that CUDA does in another way

    def _attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: bool) -> Tensor:
        return attend(attention_of(args, kwargs), self.capability, self.fused_attention)

    def _recurrent(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: bool) -> Any:
        return recurrent(_GATES[func.__name__], args, autocast)

    def _cross_entropy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: bool) -> Any:
        """A log-softmax, which is asked for in the format of the logits (ATen/native/LossNLL.cpp), so that autocast
        lets it be; and what is picked from it, which autocast wants in float32."""
        logits, *others = args
        if not (autocast and cuda_autocast.casts(logits) and logits.dtype != torch.float32):
            return func(*args, **kwargs)
        if kwargs or len(others) != 5 or others[0].is_floating_point():
            return func(*args, **kwargs)
        classes, smoothing = min(1, logits.ndim - 1), others[4]
        scores = aten._log_softmax(logits, classes, False)
        loss = torch._C._nn.nll_loss_nd(scores.float(), *others[:4])
        if smoothing:
            spread = scores.sum(classes, dtype=torch.float32)
            loss = (1 - smoothing) * loss - smoothing / logits.shape[classes] * (spread if loss.ndim else spread.mean())
        return loss


@cache
def _body(func: FunctionType) -> FunctionType | None:
    """The same function, without its question whether someone wants to replace it.

    Functions that are written in Python are replaced by what they call. To see that, the mode has to be on inside; but
    then the function asks first, and would end up here again.
    """
    asks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    if not asks:
        return None
    namespace = {**func.__globals__, **dict.fromkeys(asks, _nobody)}
    body = FunctionType(func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _here(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with the CPU in place of a GPU that a model names itself."""
    if _is_cuda(kwargs.get("device")):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if name == "to" and len(args) > 1 and _is_cuda(args[1]):
        args = (args[0], torch.device("cpu"), *args[2:])
    return args, kwargs


def _is_cuda(device: Any) -> bool:
    if isinstance(device, (str, torch.device)):
        return torch.device(device).type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)  # a number is that of a GPU


def _tell_cuda(enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)


def _nobody(*_: Any) -> bool:
    return False


@contextmanager
def _autocast_of_cuda(forget: Callable[[], None]) -> Iterator[None]:
    """Inside, autocast regions for CUDA are honoured without a GPU, and `forget` is called when the outermost ends."""
    autocast = torch.amp.autocast_mode.autocast
    begin, clear = autocast.__init__, torch.clear_autocast_cache

    def begin_on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type = "cpu"
            if dtype is None:
                dtype = torch.get_autocast_dtype("cpu") if cuda_autocast.is_on() else torch.float16
        begin(self, device_type, dtype, *args, **kwargs)

    def clear_both() -> None:
        clear()
        forget()

    autocast.__init__, torch.clear_autocast_cache = begin_on_cpu, clear_both  # type: ignore[method-assign]
    try:
        yield
    finally:
        autocast.__init__, torch.clear_autocast_cache = begin, clear  # type: ignore[method-assign]


@contextmanager
def _taken_for_real() -> Iterator[None]:
    """Inside, Hugging Face's models treat fake tensors like those of a run.

    Otherwise they build masks that a run leaves out: it looks whether all tokens are there and attention is causal.
    """
    imports = sys.modules.get("transformers.utils.import_utils")
    known = getattr(imports, "is_fake_tensor", None)
    if known is None:
        yield
        return
    imports.is_fake_tensor = _nobody  # type: ignore[union-attr]
    try:
        yield
    finally:
        imports.is_fake_tensor = known  # type: ignore[union-attr]


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: bool) -> Any:
    """One kernel that keeps a mask of bytes, where there is something to drop."""
    x, rate, train = (*args, *kwargs.values()) if len(args) < 3 else args
    if train and 0 < rate < 1 and x.numel():
        return aten.native_dropout(x, rate, True)[0]
    return func(*args, **kwargs)


def _softmax(operator: Any) -> Callable[..., Any]:
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: bool) -> Any:
        """From fp16 to float32 in one kernel; from bf16 in two."""
        x = args[0] if args else kwargs.get("input")
        wants = [d for d in (*args, kwargs.get("dtype")) if isinstance(d, torch.dtype)]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if isinstance(x, Tensor) and isinstance(dim, int) and x.dtype == torch.float16 and wants == [torch.float32]:
            return operator(x, dim, True)
        return func(*args, **kwargs)

    return run


def _batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: bool) -> Any:
    if kwargs or len(args) != 9:
        return func(*args, **kwargs)
    x, weight, bias, mean, variance, training, momentum, eps, cudnn = args
    if not (
        cudnn
        and weight is not None
        and bias is not None
        and (mean is None) == (variance is None)
        and (mean is not None or training)
        and x.dtype != torch.bfloat16
        and weight.dtype != torch.bfloat16
        and (x.dtype != torch.float16 or weight.dtype == torch.float32)
        and x.ndim >= 3
        and x.shape[0] <= (_CUDNN_BATCH_TRAINING if training else _CUDNN_BATCH_EVALUATION)
        and eps >= _CUDNN_SMALLEST_EPS
        and x.numel() < _INT32
    ):
        return func(*args)
    layout = torch.channels_last if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) else None
    x = x.contiguous(memory_format=layout or torch.contiguous_format)
    return aten.cudnn_batch_norm(x, weight, bias, mean, variance, training, momentum, eps)[0]


def _group_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: bool) -> Any:
    """CUDA has no kernel for channels that lie side by side: such images are copied first, and the copy is kept."""
    if not args:
        return func(**{**kwargs, "input": kwargs["input"].contiguous()})
    return func(args[0].contiguous(), *args[1:], **kwargs)


def _rms_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: bool) -> Any:
    given = {**dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)), **kwargs}
    x, weight, eps = given["input"], given.get("weight"), given.get("eps")
    if weight is not None and weight.dtype != x.dtype:
        return func(*args, **kwargs)  # torch has no kernel for two formats
    return ops._fused_rms_norm(x, list(given["normalized_shape"]), weight, 0.0 if eps is None else eps)[0]


def _lstm_cell(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: bool) -> Any:
    """Two products, and all that is pointwise in one kernel."""
    x, (hx, cx), w_ih, w_hh, *biases = args
    hy, cy, _ = ops._thnn_fused_lstm_cell(torch.mm(x, w_ih.t()), torch.mm(hx, w_hh.t()), cx, *biases)
    return hy, cy


def _one_hot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: bool) -> Any:
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if classes < 1:
        return func(*args, **kwargs)
    index = args[0] if args else kwargs["tensor"]
    return index.new_zeros((*index.shape, classes)).scatter_(-1, index.unsqueeze(-1), 1)
