"""Shape errors: what torch says about numbers that do not fit, told with the tensors and the module it is about.

Everything is read from the frames that the exception went through. The forward is not run again: it may be random,
change buffers, or leave a GPU in a state in which nothing can be read any more. Only a part that could not be compiled,
and so did not run, is run as it is written.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradus.record.format import error_text, first_line
from gradus.schema.errors import GradusError, InputError
from gradus.schema.user_code import users_line
from gradus.training.out_of_memory import is_out_of_memory

_ABOUT_TENSORS = re.compile(
    r"\b(shapes?|sizes?|dimensions?|dims?|dtypes?|scalar types?|same device|on device|device-side assert"
    r"|out of range|out of bounds|channels?|elements?|batch_size|must match|cannot be multiplied"
    r"|data ?type|not implemented for|type|matri(?:x|ces)|primitive descriptor)\b",
    re.IGNORECASE,
)
_ABOUT_RANKS = re.compile(
    r"Expected to have finished reduction|gloo|NCCL|Connection (closed|reset)|Broken pipe|process group"
)
_LONGEST_LIST = 12  # tensors shown of a batch or of a module's parameters


@dataclass(frozen=True)
class _Call:
    """A module that was being called when the exception came."""

    module: nn.Module
    positional: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def inputs(self) -> dict[str, Any]:
        return {**{str(number): value for number, value in enumerate(self.positional)}, **self.named}


def explain_forward_error(
    error: Exception, model: Callable[..., Any], batch: Any, *, field: str = "model", output: Any = None
) -> Exception:
    """The error with the shapes and types of everything involved, if it is about shapes, types or indices.

    Any other exception comes back as it is; what used up memory is told where the run is known. `field` is the recipe's
    key for what was running, `output` the model's answer where a loss or a metric was given it.
    """
    if not _is_about_tensors(error):
        return error
    error, call = _innermost(error)
    return InputError(
        "\n".join(_message(error, call, model, batch, field, output)),
        hint=_hint(str(error), call, field),
        field=field,
        found=described(batch),
        traceback="".join(traceback.format_exception(error)),
    )


def note_tensors(error: BaseException, model: nn.Module, batch: str | None) -> None:
    """Let such an error of an own loop, which keeps its type and its traceback, end with the tensors that it is about.

    `batch` is the one of the step that failed, as described: gone by the time that nobody has caught the error.
    """
    if not isinstance(error, Exception) or not _is_about_tensors(error):
        return
    inner, call = _innermost(error)
    if call is None and batch is None:  # neither the model nor a step: something else that the script does
        return
    lines = []
    if call is not None:
        said = f": {first_line(inner)}" if inner is not error else ""
        lines = [f"the model failed in {_name_of(call.module, model)}{said}", *_call_in_words(call)]
    notes = getattr(error, "__notes__", [])
    advised = any(note.startswith("hint: ") for note in notes)
    hint = [] if advised else [f"hint: {_hint(str(inner), call, 'step' if call is None else 'model')}"]
    vars(error)["__notes__"] = [*notes, *lines, *([f"  the batch: {batch}"] if batch else []), *hint]


def _is_about_tensors(error: Exception) -> bool:
    if isinstance(error, (GradusError, dist.DistError)) or is_out_of_memory(error):
        return False
    text, kinds = str(error), (RuntimeError, IndexError, ValueError, TypeError)
    return isinstance(error, kinds) and bool(_ABOUT_TENSORS.search(text)) and not _ABOUT_RANKS.search(text)


def _innermost(error: Exception) -> tuple[Exception, _Call | None]:
    """The module that failed, with its own error: the compiler's is of a part as a whole."""
    call = _innermost_call(error)
    if call is not None and type(error).__module__.startswith("torch._dynamo"):
        error = _without_compiler(call) or error
        inner = _innermost_call(error)
        call = inner if inner is not None else call
    return error, call


def described(values: Any) -> str:
    """The tensors in a batch, an output or a module, each with its shape and type."""
    lines = [f"{name}: {tensor_in_words(value)}" for name, value in _flattened(values)]
    if len(lines) > _LONGEST_LIST:
        lines = [*lines[:_LONGEST_LIST], f"and {len(lines) - _LONGEST_LIST} more"]
    return ", ".join(lines) or "nothing"


def tensor_in_words(value: Any) -> str:
    """Such as `float32 [8, 3, 32, 32]`; the device is named where it is not the CPU."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{where}"


def _flattened(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, Mapping):
        pairs = [(str(key), value) for key, value in values.items()]
    elif isinstance(values, (list, tuple)):
        pairs = [(str(number), value) for number, value in enumerate(values)]
    else:
        if values is not None:
            yield prefix.removesuffix(".") or "tensor", values
        return
    for name, value in pairs:
        yield from _flattened(value, f"{prefix}{name}.")


def _message(
    error: Exception, call: _Call | None, model: Callable[..., Any], batch: Any, field: str, output: Any
) -> Iterator[str]:
    who = {"model": "the model", "loss": "the loss"}.get(field, field)
    where = f"{field}: {who} failed"
    if call is not None and call.module is not model:
        where += f" in {_name_of(call.module, model)}"
    yield f"{where}: {error_text(error)}"
    if call is not None:
        yield from _call_in_words(call)
    if output is not None:
        yield f"  the model's output: {described(output)}"
    yield f"  the batch: {described(batch)}"
    line = users_line(error)
    if line is not None:
        yield f"  at {line.filename}, line {line.lineno}: {line.line}"


def _call_in_words(call: _Call) -> Iterator[str]:
    kind = type(call.module).__name__
    parameters = described(dict(call.module.named_parameters(recurse=False)))
    extra = call.module.extra_repr()
    yield f"  {kind}({extra if len(extra) < 100 else '...'}) with {parameters}"
    yield f"  was given {described(call.inputs)}"


def _innermost_call(error: Exception) -> _Call | None:
    """The deepest module that was being called, as the frames of the exception tell."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        # torch's own method around every forward: its arguments are the inputs, whatever the module does with them.
        if frame.f_code.co_name == "_call_impl" and isinstance(module, nn.Module):
            found = _Call(module, frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {}))
    return found


def _without_compiler(call: _Call) -> Exception | None:
    """What the part that could not be compiled says when it is run as it is written: which of its modules fails."""
    try:
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            call.module(*call.positional, **call.named)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        return error
    return None


def _name_of(module: nn.Module, model: Callable[..., Any]) -> str:
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    known = inner.named_modules() if isinstance(inner, nn.Module) else ()  # a function around it has no names
    name = next((name for name, one in known if one is module and name), None)
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def _hint(text: str, call: _Call | None, field: str) -> str:
    table = call.module if call is not None and isinstance(call.module, nn.Embedding) else None
    if table is not None and ("out of range" in text or "out of bounds" in text):
        return _outside_table(table, call)
    if re.search(r"Target -?\d+ is out of bounds", text):
        return "a target is not a class of the model: give it more outputs, or use -100 for targets to leave out"
    if "device-side assert" in text:
        return (
            "an index or a target is too large, and a GPU cannot say which; the CPU can: run gradus train --debug with "
            "CUDA_VISIBLE_DEVICES set to nothing"
        )
    if re.search(r"same device|on device|different devices", text):
        return (
            "a tensor was made on another device than the batch: in forward, create tensors with device=x.device, and "
            "register constants with register_buffer, so that they move with the model"
        )
    if "primitive descriptor" in text:  # of oneDNN, such as of an LSTM in fp16, but for one with packed sequences
        return (
            "this CPU has no kernel for that module in the number format it computes in, most often fp16: use "
            "plan.precision=bf16 or plan.precision=fp32"
        )
    if _is_about_types(text):
        return (
            "token ids and class targets are torch.long, real inputs and targets floating point like the model's "
            "parameters; under bf16 or fp16, do not mix .float() tensors with autocast results by hand"
        )
    if field == "loss":
        return "make the model's output and the target agree, or reshape one of them in a loss of your own"
    if field == "step":
        return "make the tensors on the line of yours that failed agree: print their shapes and types there"
    return "make the data's shapes fit the module that failed, or the module's settings the data"


def _is_about_types(text: str) -> bool:
    return bool(re.search(r"dtype|scalar type|not implemented for|data type|[a-z]Type\b|should be the same", text))


def _outside_table(table: nn.Embedding, call: _Call | None) -> str:
    rows = table.num_embeddings
    allowed = f"the table has {rows} rows, for indices 0 to {rows - 1}"
    indices = call.inputs.get("0", call.inputs.get("input")) if call is not None else None
    if isinstance(indices, Tensor) and indices.device.type == "cpu" and indices.numel():
        low, high = int(indices.min()), int(indices.max())
        found = f"the largest index is {high}" if high >= rows else f"the smallest index is {low}"
        return f"{found}, but {allowed}: enlarge the vocabulary (or context) of the model, or fix the data"
    return f"{allowed}: enlarge the vocabulary (or context) of the model, or fix the data"
