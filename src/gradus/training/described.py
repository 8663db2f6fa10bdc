"""Described: a model that is yet to be split, and where its values come from when each rank has its part of it.

A model is described first (on the meta device, where it takes no memory), then split as the plan wants it, and only
then filled: reference models draw their weights, pretrained ones are read from files, both straight into the part that
a rank holds. What only a user's constructor can make is made on rank 0 and sent from there, a piece at a time. So no
rank but that one ever holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradus.checkpoint.base import mark_base
from gradus.checkpoint.reading import CHUNK_BYTES, read_rows
from gradus.checkpoint.state import model_tensors
from gradus.checkpoint.tensor_file import StoredTensor
from gradus.checkpoint.weights import open_weights
from gradus.models.huggingface import require_known_weights
from gradus.models.initialise import fill_tables
from gradus.models.layouts import Link
from gradus.parallel.materialise import materialise, taken_off
from gradus.parallel.part import put_rows
from gradus.parallel.world import World
from gradus.schema.recipe import Recipe
from gradus.training.construction import constructed, is_reference
from gradus.training.freezing import freeze
from gradus.training.lora import start_adapters, with_lora
from gradus.training.pretrained import assignments
from gradus.training.randomness import seed_for_construction


@dataclass(frozen=True)
class Described:
    model: nn.Module  # on the meta device; or whole, where ranks are replicas of a user's own model
    recipe: Recipe
    pretrained: list[tuple[StoredTensor, Link]]  # what is read from files
    unread: dict[str, tuple[tuple[int, ...], torch.dtype]]  # shapes of what no file has, by name
    sent: bool = False  # whether that comes from rank 0
    values: dict[str, Tensor] = field(default_factory=dict)  # what rank 0 sends, in its host memory
    note: str | None = None  # what the user should know about how it was built

    def fill(self, part: nn.Module, world: World, *, shards_on: torch.device | None = None) -> None:
        """Give what this rank holds of the model memory and values. All ranks must call it.

        Parts have the names of the whole model. Sharded parameters go to `shards_on`, or as all else to the device.
        """
        recipe = self.recipe
        if any(tensor.is_meta for tensor in (*part.parameters(), *part.buffers())):
            materialise(part, world.device, shards_on)
        if is_reference(recipe):
            self._start(part, world.device if shards_on else None)
        if self.sent:
            _send(self.unread, self.values, part, world)
        targets = model_tensors(part)
        for stored, link in self.pretrained:
            if link.ours in targets:
                read_rows(stored, targets[link.ours], link.runs, transposed=link.transposed)
        if recipe.lora is not None:
            start_adapters(part, recipe.seed)
            mark_base(part, world)

    def _start(self, part: nn.Module, drawn_on: torch.device | None) -> None:
        """The weights that a reference model starts with, unless files have all of them."""
        saved = model_tensors(self.model)
        if not any(name in saved for name in self.unread):
            fill_tables(part)
            return
        seed_for_construction("model", self.recipe.seed)
        # Another kind of device draws other numbers; shards in host memory are drawn where they would be otherwise. A
        # checkpoint of adapters does not hold the base, which export and load_model draw again, wherever they are:
        # there the host draws.
        if self.recipe.lora is not None:
            drawn_on = torch.device("cpu")
        # It looks at nothing but the settings and the names, so that a stage of a pipeline will do as well.
        init_weights: Callable[..., None] = type(self.model).init_weights  # type: ignore[attr-defined]
        if part is not self.model:
            vars(part)["settings"] = self.model.settings
        init_weights(part, drawn_on)


def described_model(
    recipe: Recipe, world: World, dtype: torch.dtype, *, divided: bool = False, load_weights: bool = True
) -> Described:
    """The recipe's model, with its adapters and what is frozen, as it is to be split.

    Reference models are on the meta device. A user's own is whole where ranks are replicas, and has its values. Where
    it is to be `divided`, it is on the meta device too, and rank 0 holds what no file has.
    """
    if is_reference(recipe):
        with torch.device("meta"):
            model = constructed(recipe, dtype)
        return described_as(recipe, model, world, load_weights=load_weights)
    if not divided:
        model = constructed(recipe, dtype).to(world.device)
        return described_as(recipe, model, world, load_weights=load_weights)
    empty, problem = _without_memory(recipe, dtype)
    if empty is None:
        note = f"every rank held the whole model in host memory while it was built: {problem}"
        model = constructed(recipe, dtype)
        return replace(described_as(recipe, model, world, divided=True, load_weights=load_weights), note=note)
    described = described_as(recipe, empty, world, load_weights=load_weights)
    if not described.unread:
        return described
    values: dict[str, Tensor] = {}
    if world.leads:
        model = constructed(recipe, dtype)
        if load_weights:
            require_known_weights(model, recipe.model.weights_skip)
        values = taken_off(model)
    return replace(described, sent=True, values=values)


def described_as(
    recipe: Recipe, model: nn.Module, world: World, *, divided: bool = False, load_weights: bool = True
) -> Described:
    """A model that is there already. To be `divided`, it is taken off all ranks, and rank 0's values are sent."""
    reads = load_weights or recipe.lora is not None  # else a checkpoint follows that has everything
    pretrained = []
    if recipe.model.weights is not None and reads:
        pretrained = assignments(model, open_weights(Path(recipe.model.weights)), recipe.model.weights_skip)
    elif load_weights:  # where a checkpoint follows, what a folder lacks does not matter
        require_known_weights(model, recipe.model.weights_skip)
    read = {part.link.ours for part in pretrained} if reads else set(model_tensors(model))
    named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = taken_off(model) if divided else {}
    return Described(
        model=_adapted(recipe, model),
        recipe=recipe,
        pretrained=[(part.stored, part.link) for part in pretrained],
        unread={name: (tuple(t.shape), t.dtype) for name, t in named.items() if name not in read},
        sent=divided,
        values=values if world.leads else {},
    )


def outlined_model(recipe: Recipe, dtype: torch.dtype) -> tuple[nn.Module, str | None]:
    """The model without values, as it would be trained: with its adapters and what is frozen, on the meta device.

    A user's own that cannot be built there is built in host memory; then the second is why.
    """
    bare = as_constructed(recipe)
    if is_reference(recipe):
        with torch.device("meta"):
            return _adapted(recipe, constructed(bare, dtype)), None
    empty, problem = _without_memory(bare, dtype)
    return _adapted(recipe, constructed(bare, dtype) if empty is None else empty), problem or None


def as_constructed(recipe: Recipe) -> Recipe:
    """The recipe of the bare model: neither pretrained nor with adapters, and nothing frozen."""
    bare = recipe.model.model_copy(update={"weights": None, "weights_skip": []})
    return recipe.model_copy(update={"model": bare, "lora": None, "freeze": []})


def _adapted(recipe: Recipe, model: nn.Module) -> nn.Module:
    if recipe.lora is not None:
        model = with_lora(model, recipe.lora, recipe.seed)
        for name, parameter in model.named_parameters():
            if any(fnmatchcase(name, pattern) for pattern in recipe.model.weights_skip):
                parameter.requires_grad_(True)  # a new head: frozen, it would stay as it was drawn
    freeze(model, recipe.freeze)
    return model


def _without_memory(recipe: Recipe, dtype: torch.dtype) -> tuple[nn.Module | None, str]:
    """A user's model on the meta device, or None and what stands against it."""
    try:
        with torch.device("meta"):
            model = constructed(recipe, dtype)
    except Exception as error:  # constructors that look at values fail in many ways; others fail again in memory
        return None, f"it cannot be built on the meta device ({str(error).strip().partition(chr(10))[0]})"
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                return None, f"{f'{name}.{key}'.strip('.')} is a tensor, but neither a parameter nor a buffer"
    if not all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return None, "it does not follow the default device"
    return model, ""


@torch.no_grad()
def _send(
    unread: Mapping[str, tuple[tuple[int, ...], torch.dtype]], values: dict[str, Tensor], part: nn.Module, world: World
) -> None:
    """Rank 0's values, some rows at a time, into what each rank holds of them. They are gone from rank 0 after that."""
    here: dict[str, Tensor] = {**dict(part.named_parameters()), **dict(part.named_buffers())}
    for name, (shape, dtype) in unread.items():
        source = values.pop(name, None)
        assert source is not None or not world.leads, name
        rows, *others = shape or (1,)
        row_bytes = max(1, dtype.itemsize * torch.Size(others).numel())
        at_once = max(1, CHUNK_BYTES // row_bytes)
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            if source is None:
                chunk = torch.empty((count, *others), dtype=dtype)
            else:
                chunk = source.reshape(rows, *others)[first : first + count].to("cpu").contiguous()
            if world.size > 1 and chunk.numel():
                dist.broadcast(chunk.view(-1).view(torch.uint8), src=0)
            if name in here:
                put_rows(here[name], chunk, first)
