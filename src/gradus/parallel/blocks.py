"""The repeated blocks of any model, found by structure: what is sharded, recomputed and compiled one by one.

A block is a module with children whose class occurs at least twice, side by side: the layers of a transformer, the
residual blocks of a convolutional net. Containers are looked through. A few large modules that are lists of such blocks
themselves (the encoder and the decoder of T5, the stages of Swin) give theirs instead.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from torch import nn

LARGE = 1 / 8  # of the model's parameters: a class whose modules hold more on average may be stacks of blocks


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks in order of registration, none inside another; none at all if nothing with children repeats."""
    blocks = _found_by_class(model) or _found_in_a_list(model)
    return blocks if len(blocks) > 1 else []


def parameter_count(modules: Iterable[nn.Module]) -> int:
    """The parameters of these modules, each counted once however many of them hold it."""
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())


def _found_by_class(model: nn.Module) -> list[nn.Module]:
    repeated = {kind for kind, modules in _outermost_by_class(model).items() if len(modules) > 1}
    repeated -= _stacks(model, repeated)
    found = _outermost(model, repeated)
    # A class that repeats only inside blocks of another (the attention of the one layer that has no twin) does not.
    times = Counter(type(module) for module in found)
    return [module for module in found if times[type(module)] > 1]


def _found_in_a_list(model: nn.Module) -> list[nn.Module]:
    """Blocks without a class of their own: of the lists whose members are sequences, the alike ones that hold most."""
    best: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        alike: dict[object, list[nn.Module]] = defaultdict(list)
        for child in dict.fromkeys(module):
            if _has_children(child):
                alike[tuple(type(inner) for inner in child.modules())].append(child)
        for members in alike.values():
            if len(members) > 1 and parameter_count(members) > parameter_count(best):
                best = members
    return best


def _outermost(model: nn.Module, kinds: set[type[nn.Module]]) -> list[nn.Module]:
    """The modules of these classes that are inside no other of them. The model itself is not one of them."""
    found: dict[nn.Module, None] = {}  # a module that hangs in two places is one module

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if type(child) in kinds:
                found[child] = None
            else:
                walk(child)

    walk(model)
    inside = {inner for module in found for inner in module.modules() if inner is not module}
    return [module for module in found if module not in inside]


def _outermost_by_class(model: nn.Module) -> dict[type[nn.Module], list[nn.Module]]:
    kinds = dict.fromkeys(type(module) for module in model.modules() if _may_be_block(module))
    return {kind: [m for m in _outermost(model, {kind}) if _may_be_block(m)] for kind in kinds}


def _stacks(model: nn.Module, kinds: set[type[nn.Module]]) -> set[type[nn.Module]]:
    """Of these classes, those that are few and large and hold blocks in a list."""
    total = parameter_count([model])
    stacks = set()
    for kind in kinds:
        modules = _outermost(model, {kind})
        large = sum(parameter_count([module]) for module in modules) > LARGE * total * len(modules)
        if large and any(_holds_a_list_of_blocks(module) for module in modules):
            stacks.add(kind)
    return stacks


def _holds_a_list_of_blocks(module: nn.Module) -> bool:
    """Whether it has, at any depth, two blocks of one class in one container or under one name with numbers.

    A decoder layer has two attentions, but under two names: it is a block.
    """
    for inner in module.modules():
        in_container = _is_container(inner)
        seen: Counter[tuple[str, type[nn.Module]]] = Counter()
        for name, child in inner.named_children():
            if _may_be_block(child):
                seen["" if in_container else re.sub(r"\d+", "#", name), type(child)] += 1
        if any(times > 1 for times in seen.values()):
            return True
    return False


def _may_be_block(module: nn.Module) -> bool:
    return not _is_container(module) and _has_children(module) and any(True for _ in module.parameters())


def _is_container(module: nn.Module) -> bool:
    """A list, a dictionary or a plain sequence of modules; one with a forward of its own is no mere container."""
    return type(module) is nn.Sequential or type(module).forward is nn.Module.forward


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())
