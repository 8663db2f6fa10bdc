"""Compiled in place: a model that its user compiled, under the names that it has without.

`torch.compile(model)` returns a wrapper, and the name of every parameter begins with `_orig_mod.` from then on. Here
the model takes the wrapper's place, and a call of it is what the wrapper would have done, as after `model.compile()`.
So checkpoints, patterns and messages know no other names, and a run goes on with or without the compiler.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gradus.checkpoint.own_names import COMPILED
from gradus.training.compilation import call_to_compile


def compiled_in_place(model: nn.Module) -> nn.Module:
    """The model without wrappers of torch.compile, at any depth. Its parts are changed in place."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and _is_wrapper(child):
                module._modules[name] = _without_wrapper(child)
    return _without_wrapper(model) if _is_wrapper(model) else model


def _is_wrapper(module: nn.Module) -> bool:
    """Without the wrapper's class, which takes seconds to import."""
    return list(module._modules) == [COMPILED] and hasattr(module, "dynamo_ctx")


def _without_wrapper(wrapper: nn.Module) -> nn.Module:
    model: Any = wrapper._modules[COMPILED]
    wrapper.forward = wrapper.dynamo_ctx(call_to_compile(model))  # type: ignore[operator]
    model._compiled_call_impl = wrapper._call_impl  # so that hooks upon the wrapper are called
    wrapper._compiled_call_impl = model.__call__  # for a script that goes on with the wrapper
    return model  # type: ignore[no-any-return]
