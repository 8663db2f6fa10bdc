"""recompute: what a block computed on the way forward is computed again for backward, instead of being kept.

| recompute | a block keeps                                             | and computes again   |
|-----------|-----------------------------------------------------------|----------------------|
| none      | all that backward needs                                   | nothing              |
| selective | its input, and what matmuls, attention and convolutions gave | the cheap rest    |
| full      | its input                                                 | everything           |

Gradients are the same to the last bit: dropout draws what it drew. Running statistics are not updated again: those of
norms, and those that a module names in its attribute `statistics`, because its forward counts in them and does not read
them. With `activation_offload`, what is kept for backward waits in host memory.

With `recompute_blocks`, only the first so many blocks are recomputed: as many as memory asks for. The first, because
backward comes to them last, when what the others kept is gone and there is room for what is computed again.

Only `forward` of each block is replaced, so that the names of parameters stay. The rest of a model keeps what it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gradus.parallel.batch_norm import STATISTICS, SharedBatchNorm
from gradus.parallel.blocks import repeated_blocks
from gradus.parallel.host_memory import waiting_on_host
from gradus.parallel.split_rules import more_than_its_blocks
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional

# What takes long to compute beside the memory that its output takes, on any device. Collectives are among them: to
# communicate again would take a link's time, not the device's.
KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_mm.default,
    _aten._grouped_mm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops.higher_order.flex_attention,
    _c10d.all_reduce.default,
    _c10d.reduce_scatter_tensor.default,
    _c10d.all_to_all_single.default,
}

Forward = Callable[..., Any]


def apply_recompute(model: nn.Module, plan: Plan) -> None:
    """Let the repeated blocks of any model, in place, keep for backward what the plan says. Before compilation."""
    blocks = repeated_blocks(model)
    if plan.recompute != "none" and (refusal := more_than_its_blocks(plan, type(model).__name__, len(blocks))):
        raise refusal
    for place, block in enumerate(blocks or [model]):
        if plan.recompute != "none" and (plan.recompute_blocks is None or place < plan.recompute_blocks):
            _surround(block, functools.partial(_recomputed, plan.recompute == "selective"))
        if plan.activation_offload:
            # Left to Python: the hooks have to be in place around what is compiled.
            _surround(block, _offloaded, compiled=False)


def recompute_note(model: nn.Module, plan: Plan) -> str | None:
    """What people should know before they wonder: which part of the model the plan's choice applies to."""
    wanted = [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
    wanted += ["activation_offload"] if plan.activation_offload else []
    if not wanted:
        return None
    what = " and ".join(wanted)
    blocks = repeated_blocks(model)
    if blocks:
        kinds = ", ".join(dict.fromkeys(type(block).__name__ for block in blocks))
        return f"{what}: {_how_many(len(blocks), plan)} ({kinds})"
    note = f"{what}: {type(model).__name__} has no repeated blocks, so that it is treated as one"
    if plan.recompute == "full":
        note += "; backward then computes all of it again at once, which saves memory only before backward"
    return note


def _how_many(blocks: int, plan: Plan) -> str:
    first = plan.recompute_blocks
    if plan.recompute == "none" or first is None or first >= blocks:
        return f"{blocks} blocks"
    others = f", activation_offload of all {blocks}" if plan.activation_offload else ""
    return f"the first {first} of {blocks} blocks{others}"


def _surround(block: nn.Module, around: Callable[..., Any], *, compiled: bool = True) -> None:
    """Replace the block's forward, on this instance, by `around(forward, block, *args, **kwargs)`.

    As a method that is bound to the block: a deep copy of the block is then bound to the copy.
    """
    present = block.forward
    if isinstance(present, MethodType) and present.__self__ is block:
        inner: Forward = present.__func__
    else:  # put there by somebody else, and bound to whatever they meant

        def inner(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return present(*args, **kwargs)

    @functools.wraps(inner)
    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(inner, block, *args, **kwargs)

    if not compiled:
        forward = torch.compiler.disable(forward, recursive=False)  # type: ignore[no-untyped-call]
    block.forward = MethodType(forward, block)


# --- computing again


def _recomputed(selective: bool, forward: Forward, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(block, *args, **kwargs)
    options: dict[str, Any] = {}
    if not torch.compiler.is_compiling():
        options["context_fn"] = functools.partial(_contexts, block, selective)
    elif selective:  # a compiled block updates its buffers once by construction, and takes no other context than this
        options["context_fn"] = _selective_contexts
    with _buffers_watched(block):
        return checkpoint(functools.partial(forward, block), *args, use_reentrant=False, **options, **kwargs)


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    keeping, recalling = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return keeping, recalling


def _policy(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(block: nn.Module, selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What a block's forward runs in, and what its recomputation runs in."""
    keeping, recalling = _selective_contexts() if selective else (nullcontext(), nullcontext())
    return keeping, _Again(block, recalling)


class _Again:
    """A recomputation: layers are as they were in forward, and what they do to their statistics is forgotten.

    It can be entered again, as a schedule that takes backward apart does.
    """

    def __init__(self, block: nn.Module, recalling: AbstractContextManager[Any]) -> None:
        self._recalling = recalling
        self._changing = [(module, name) for module in block.modules() for name in _statistics(module)]
        norms = [module for module in block.modules() if isinstance(module, SharedBatchNorm)]
        self._muted = [(norm, norm.muted) for norm in norms]  # as a rank is that has only padding

    def __enter__(self) -> None:
        self._set_aside = [(module, name, getattr(module, name)) for module, name in self._changing]
        for module, name, value in self._set_aside:
            setattr(module, name, value.clone() if isinstance(value, Tensor) else value)
        self._muted_now = [(norm, norm.muted) for norm, _ in self._muted]
        _put(self._muted)
        self._recalling.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recalling.__exit__(kind, error, traceback)
        _put(self._muted_now)
        for module, name, value in self._set_aside:
            setattr(module, name, value)
        if isinstance(error, RuntimeError) and "has been mutated" in str(error):
            raise _changed_in_place() from error


def _put(muted: list[tuple[SharedBatchNorm, bool]]) -> None:
    for norm, value in muted:
        norm.muted = value


def _statistics(module: nn.Module) -> tuple[str, ...]:
    """Tensors that the module's forward updates while training and that its result does not depend on."""
    names: tuple[str, ...] = STATISTICS if isinstance(module, _NormBase) else getattr(module, "statistics", ())
    return names if module.training else ()


@contextmanager
def _buffers_watched(block: nn.Module) -> Iterator[None]:
    """Refuse a block whose forward changes a buffer: to do it again would change it twice, and maybe the result."""
    if torch.compiler.is_compiling():
        yield
        return
    before = [
        (module, name, buffer, buffer._version)
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in _statistics(module)
    ]
    yield
    for module, name, buffer, version in before:
        if module._buffers.get(name) is not buffer or buffer._version != version:
            raise InputError(
                f"plan.recompute: {type(module).__name__} in {type(block).__name__} changes its buffer {name} in "
                "forward, and would change it again when that is recomputed",
                hint="use plan.recompute=none; or, if forward only counts in it and does not read it, name it in an "
                f"attribute of the class: statistics = ({name!r},)",
                field="plan.recompute",
                found=f"{type(module).__name__}.{name}",
                allowed="none",
            )


def _changed_in_place() -> InputError:
    return InputError(
        "plan.recompute: found selective, but the model changes the result of a matmul, attention or convolution in "
        "place (as ReLU(inplace=True) right after one does), so that it cannot be kept",
        hint="use plan.recompute=full, or leave out inplace=True",
        field="plan.recompute",
        found="selective",
        allowed="none, full",
    )


# --- waiting in host memory


def _offloaded(forward: Forward, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(block, *args, **kwargs)
    with waiting_on_host(block):
        return forward(block, *args, **kwargs)
