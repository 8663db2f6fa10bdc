"""Pretrained: `model.weights` put into a model that is built already, one tensor after the other.

Everything is checked from the files' headers first. Then each tensor's bytes go straight into the parameter's memory
where type and layout agree, and otherwise through a small buffer, so that a rank never holds more than its own part of
the model and one tensor. Of a parameter that is sharded over ranks only this rank's rows are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from re import fullmatch

import torch
from torch import Tensor, nn

from gradus.checkpoint.reading import DTYPES, read_rows, same_bytes
from gradus.checkpoint.state import model_tensors
from gradus.checkpoint.tensor_file import StoredTensor
from gradus.checkpoint.weights import Weights, open_weights
from gradus.models.config_json import recognised
from gradus.models.layouts import Layout, Link
from gradus.models.settings import Settings
from gradus.schema.errors import InputError
from gradus.schema.patterns import matching

FIELD = "model.weights"
_NAMES_SHOWN = 8


@dataclass(frozen=True)
class Assignment:
    """A stored tensor, and the rows of one of the model's that it is for."""

    stored: StoredTensor
    target: Tensor
    link: Link


def load_pretrained(model: nn.Module, path: Path, skip: Sequence[str] = ()) -> None:
    """Fill a model from a safetensors file, a folder, a checkpoint or a run. `skip`: patterns of names to leave out."""
    for part in assignments(model, open_weights(path), skip):
        read_rows(part.stored, part.target, part.link.runs, transposed=part.link.transposed)


def assignments(model: nn.Module, weights: Weights, skip: Sequence[str] = ()) -> list[Assignment]:
    """Which stored tensor goes where. Anything that does not fit is an error, before a single byte was changed."""
    targets = model_tensors(model)
    stored, layout = _in_layout(model, weights)
    stored = _without_aliases(stored, layout.aliases, weights.path)
    links = list(layout.links)
    if skip:  # by either name, ours or the file's
        skipped = set(matching([*targets, *stored], skip, f"{FIELD}_skip"))
        skipped |= {link.ours for link in links if link.theirs in skipped}
        links = [link for link in links if link.ours not in skipped]
        targets = {name: tensor for name, tensor in targets.items() if name not in skipped}
        stored = {name: tensor for name, tensor in stored.items() if name not in skipped}
    _check_names(links, targets, stored, layout, weights.path)
    assigned = [Assignment(stored[link.theirs], targets[link.ours], link) for link in links]
    _check_shapes(assigned, weights.path)
    return assigned


def _in_layout(model: nn.Module, weights: Weights) -> tuple[dict[str, StoredTensor], Layout]:
    """The stored tensors by the names of the layout that they are in."""
    settings = getattr(model, "settings", None)
    if isinstance(settings, Settings):
        shapes = {name: tensor.shape for name, tensor in weights.tensors.items()}
        found = recognised(settings, shapes, weights.config, str(weights.path))
        if found is not None:
            layout, spelled = found
            return {spelled[name]: tensor for name, tensor in weights.tensors.items()}, layout
    links = tuple(Link(name, name) for name in model_tensors(model))
    return dict(weights.tensors), Layout("own", links, _tied_names(model))


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Second names of parameters that the model holds in more than one place."""
    first: dict[int, str] = {id(tensor): name for name, tensor in model_tensors(model).items()}
    everywhere = model.state_dict(keep_vars=True).items()
    return {name: first[id(t)] for name, t in everywhere if id(t) in first and first[id(t)] != name}


def _without_aliases(
    stored: dict[str, StoredTensor], aliases: Mapping[str, str], path: Path
) -> dict[str, StoredTensor]:
    """Tied tensors under their first name only. Where the file has both, they must be the same."""
    kept = {name: tensor for name, tensor in stored.items() if name not in aliases}
    for alias, first in aliases.items():
        if alias not in stored:
            continue
        if first in kept and not same_bytes(stored[alias], kept[first]):
            raise InputError(
                f"{FIELD}: {path}: {alias} and {first} differ, but the model has one tensor for both",
                hint="--set model.tied=false" if alias in ("lm_head.weight", "head.output.weight") else None,
                field=FIELD,
                found=[alias, first],
            )
        kept.setdefault(first, stored[alias])
    return kept


def _check_names(
    links: Sequence[Link], targets: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], layout: Layout, path: Path
) -> None:
    linked = {link.ours for link in links}
    missing = sorted({link.theirs for link in links} - stored.keys()) + sorted(targets.keys() - linked)
    wanted = {link.theirs for link in layout.links}
    unexpected = sorted(name for name in stored.keys() - wanted if not fullmatch(layout.unused, name))
    if not missing and not unexpected:
        return
    parts = [
        f"{what} ({len(names)}): {_shown(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    raise InputError(
        f"{FIELD}: {path} does not fit the model; {'; '.join(parts)}",
        hint=_what_to_change(missing, unexpected, [*targets, *wanted, *stored]),
        field=FIELD,
        found=str(path),
        missing=missing,
        unexpected=unexpected,
    )


def _what_to_change(missing: list[str], unexpected: list[str], known: Sequence[str]) -> str:
    if missing == ["head.output.weight"] and not unexpected:
        return "the file's output projection is its token embedding: --set model.tied=true"
    if len({*missing, *unexpected}) == len(set(known)):
        return "no name of the file is one of the model's: give the weights of this model, or change model.use"
    listed = {*missing, *unexpected}
    whole_layers = {name: f"{name.rpartition('.')[0]}.*" for name in [*missing, *unexpected] if "." in name}
    patterns = [
        layer if layer and all(other in listed for other in known if fnmatchcase(other, layer)) else name
        for name, layer in ((name, whole_layers.get(name)) for name in [*missing, *unexpected])
    ]
    shown = _shown([f'"{pattern}"' for pattern in dict.fromkeys(patterns)])
    return f"change the model to fit, or leave these out and start with new ones: model.weights_skip: [{shown}]"


def _check_shapes(assigned: Iterable[Assignment], path: Path) -> None:
    wrong = []
    for part in assigned:
        link, shape = part.link, tuple(part.target.shape)
        rows = shape if link.rows is None else (link.rows, *shape[1:])
        expected = tuple(reversed(rows)) if link.transposed else rows
        if part.stored.shape != expected:
            wrong.append(f"{link.theirs} is {part.stored.shape} there and {expected} here")
        elif not _converts(DTYPES[part.stored.dtype], part.target.dtype):
            wrong.append(f"{link.theirs} is {part.stored.dtype} there and {part.target.dtype} here")
    if wrong:
        raise InputError(
            f"{FIELD}: {path} is of a model of another shape; {_shown(wrong, '; ')}",
            hint="change the settings of the model to those of the file; or leave such tensors out with "
            "model.weights_skip",
            field=FIELD,
            found=wrong,
        )


def _converts(stored: torch.dtype, target: torch.dtype) -> bool:
    """Whether numbers keep their meaning. 8-bit floats do not without scales, nor do whole numbers as weights."""
    if stored == target:
        return True
    return stored.is_floating_point and target.is_floating_point and min(stored.itemsize, target.itemsize) > 1


def _shown(names: Sequence[str], separator: str = ", ") -> str:
    more = f"{separator}... and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return separator.join(names[:_NAMES_SHOWN]) + more
