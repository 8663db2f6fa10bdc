"""tensor: the layers of a model divided over the ranks of a tensor group, with DTensor and torch's parallel styles.

A plan names layers and how each is divided. It comes from the recipe (`tensor_plan`), from a reference model (its
`tensor_plan` method) or from a Hugging Face model (its `tp_plan`), in this order. Layers without a style stay whole on
every rank and must see the same input there (no slice of it), so that their gradients are the same too.

| style             | layer               | each rank holds     | input           | output                           |
|-------------------|---------------------|---------------------|-----------------|----------------------------------|
| `colwise`         | Linear, Embedding   | some outputs        | whole           | its own outputs                  |
| `colwise_gather`  | Linear, Embedding   | some outputs        | whole           | whole                            |
| `rowwise`         | Linear              | some inputs         | its own inputs  | whole: summed over ranks         |
| `rowwise`         | Embedding           | some rows           | whole           | whole: summed over ranks         |
| `rowwise_split`   | Linear              | some inputs         | whole           | whole: summed over ranks         |
| `rowwise_scatter` | Linear, Embedding   | as `rowwise`        | as `rowwise`    | a slice of the sequence, summed  |
| `gather`          | any                 | what its layers say | a slice         | what its layers say              |
| `sequence`        | a norm, a Linear    | all                 | a slice         | a slice                          |
| `shared`          | a norm              | all                 | another part    | of that part                     |
| `replicate`       | any                 | all                 | whole           | whole                            |

The sequence is dimension 1. With it in slices between blocks (sequence parallel), norms work on a rank's own tokens,
and what would be one all-reduce is a reduce-scatter after a block's branch and an all-gather before the next.
Gradients of layers that see slices are sums over the ranks, as DTensors that are still Partial: whoever steps settles
them first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from gradus.parallel.part import local_part
from gradus.parallel.vocabulary import vocabulary_loss
from gradus.parallel.world import World
from gradus.schema.errors import InputError, nearest
from gradus.schema.foreign import is_pretrained_model
from gradus.schema.patterns import matching
from gradus.schema.plan import Mesh, Plan

FIELD = "tensor_plan"
SEQUENCE = Shard(1)


class DividedEmbedding(nn.Embedding):
    """A table of which each rank has some rows. What other ranks' rows give is zero here, until all is summed.

    torch's own way would compute the gradient of all rows on every rank.
    """

    first_row: int
    scatter: bool

    def forward(self, tokens: Tensor) -> Tensor:
        assert isinstance(self.weight, DTensor)
        rows, mesh = self.weight.to_local(), self.weight.device_mesh
        row = tokens - self.first_row
        here = (row >= 0) & (row < rows.shape[0])
        if rows.shape[0]:
            x = F.embedding(torch.where(here, row, 0), rows, self._padding_row(rows.shape[0])) * here.unsqueeze(-1)
        else:  # fewer rows than ranks; the sum keeps backward alike on all of them
            x = rows.new_zeros(*tokens.shape, self.embedding_dim) + rows.sum()
        summand = DTensor.from_local(x, mesh, [Partial()], run_check=False)
        if self.scatter:
            _check_length(summand)
        return summand.redistribute(placements=[SEQUENCE if self.scatter else Replicate()]).to_local()

    def _padding_row(self, rows: int) -> int | None:
        row = -1 if self.padding_idx is None else self.padding_idx - self.first_row
        return row if 0 <= row < rows else None


class Rowwise(RowwiseParallel):
    """A Linear layer gets its own inputs, unless they are whole; an Embedding gets all tokens."""

    def __init__(self, *, whole_input: bool = False, scatter: bool = False) -> None:
        super().__init__(
            input_layouts=Replicate() if whole_input else Shard(-1),
            output_layouts=SEQUENCE if scatter else Replicate(),
        )
        self.scatter = scatter

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            if self.scatter:
                module.scatter = True  # type: ignore[assignment]
                module.register_forward_hook(lambda module, inputs, output: _check_length(output))
            return super()._apply(module, device_mesh)
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.weight = nn.Parameter(weight)
        module.__class__ = DividedEmbedding
        assert isinstance(module, DividedEmbedding)
        module.first_row, module.scatter = local_part(weight).offset[0], self.scatter
        return module


class SliceOfWhole(ParallelStyle):
    """A table with all rows on every rank: of the positions that it is given, a rank looks up its own slice."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(-1))._apply(module, device_mesh)
        return SequenceParallel(sequence_dim=-1, use_local_output=True)._apply(module, device_mesh)


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": Rowwise,
    "rowwise_split": lambda: Rowwise(whole_input=True),
    "rowwise_scatter": lambda: Rowwise(scatter=True),
    "gather": lambda: PrepareModuleInput(input_layouts=SEQUENCE, desired_input_layouts=Replicate()),
    "sequence": lambda: SequenceParallel(sequence_dim=1, use_local_output=True),
    # Along which dimension the parts differ makes no difference to a layer that works on the last one.
    "shared": lambda: SequenceParallel(sequence_dim=0, use_local_output=True),
}
# Of reference models: they work together with the layers' own code.
OWN_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "slice": SliceOfWhole,
    "vocabulary": lambda: ColwiseParallel(use_local_output=False),
    "vocabulary_gather": lambda: ColwiseParallel(input_layouts=SEQUENCE, use_local_output=False),
}
REPLICATE = "replicate"
# Hugging Face's names for the same.
THEIR_STYLES = {
    "colwise": "colwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "rowwise": "rowwise",
    "rowwise_rep": "rowwise_split",
    "rowwise_split_input": "rowwise_split",
    "embedding_rowwise": "rowwise",
    "embedding_colwise": "colwise_gather",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "shared",
    "replicate": REPLICATE,
}


def apply_tensor(model: nn.Module, world: World, plan: Plan, tensor_plan: Mapping[str, str]) -> None:
    """Divide the layers of a model, in place, over the ranks of this rank's tensor group.

    Parameters become DTensors under their old names. On the meta device nothing is sent; otherwise all ranks start from
    what the first of the group has. A tied parameter stays one.
    """
    if plan.mesh.tensor == 1:
        return
    mesh = world.submesh("tensor")
    styles = _style_of_layers(model, plan, tensor_plan)
    layers = dict(model.named_modules())
    for name, style in styles.items():
        _check_divides(name, layers[name], style, plan.mesh.tensor)
    _share_values(model, mesh)
    places = _places_of_parameters(model)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, style in styles.items():
        # Values are the same on all ranks by now, and on the meta device there are none: nothing is to be sent.
        parallelize_module(layers[name], mesh, {**STYLES, **OWN_STYLES}[style](), src_data_rank=None)
        if style.startswith("vocabulary"):
            _divide_loss(layers[name.rpartition(".")[0]], layers[name], mesh)
    _tie_again(places)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(trained[name])  # SequenceParallel forgets that a layer is frozen


def divided_layers(model: nn.Module, tensor_plan: Mapping[str, str]) -> dict[str, str]:
    """The layers that a tensor group would divide, and how; none where nothing says so."""
    plan = Plan(mesh=Mesh(tensor=2))
    try:
        return _style_of_layers(model, plan, tensor_plan)
    except InputError:
        if tensor_plan:
            raise
        return {}


def part_of_sequence(model: nn.Module, world: World) -> tuple[int, int]:
    """Which part of its samples' sequences a rank works on: those with another part draw other numbers for dropout.

    Ranks of a tensor group that have whole sequences between blocks must draw the same. (Their attention then drops the
    same places in each rank's own heads.)
    """
    in_slices = any(getattr(module, "scatter", False) is True for module in model.modules())
    return world.place.context, world.place.tensor if in_slices else 0


def _style_of_layers(model: nn.Module, plan: Plan, tensor_plan: Mapping[str, str]) -> dict[str, str]:
    """The layers that are divided, in the model's order, and how."""
    names = [name for name, _ in model.named_modules() if name]
    given = tensor_plan or _plan_of_model(model, plan)
    chosen: dict[str, str] = {}
    for pattern, style in given.items():
        if tensor_plan and style not in (*STYLES, REPLICATE):
            raise _unknown_style(pattern, style)
        # A model's own plan may name parts that this one does not have.
        found = matching(names, [pattern], FIELD) if tensor_plan else [n for n in names if fnmatchcase(n, pattern)]
        for name in found:
            if chosen.setdefault(name, style) != style:
                raise InputError(
                    f"{FIELD}: {name} is both {chosen[name]} and {style}, since two patterns match it",
                    hint="give one of them more of the name",
                    field=FIELD,
                    found={other: by for other, by in given.items() if fnmatchcase(name, other)},
                )
    return {name: chosen[name] for name in names if chosen.get(name, REPLICATE) != REPLICATE}


def _plan_of_model(model: nn.Module, plan: Plan) -> Mapping[str, str]:
    """How a model itself says that it is divided: a reference model, or one of Hugging Face."""
    own = getattr(model, "tensor_plan", None)
    if callable(own):
        slices = plan.mesh.tensor * plan.mesh.context if plan.sequence_parallel else 1
        return cast(Mapping[str, str], own(slices))
    theirs = getattr(model, "_tp_plan", None) if is_pretrained_model(type(model)) else None
    if not theirs:
        raise InputError(
            f"plan.mesh.tensor: found {plan.mesh.tensor}, but nothing says how the layers of {type(model).__name__} "
            "are divided",
            hint='name them in the recipe, tensor_plan: {"layers.*.q": colwise, "layers.*.out": rowwise}, or use shard',
            field="plan.mesh.tensor",
            found=plan.mesh.tensor,
            allowed=1,
        )
    unknown = {pattern: style for pattern, style in theirs.items() if style not in THEIR_STYLES}
    if unknown:
        raise InputError(
            f"plan.mesh.tensor: the plan that {type(model).__name__} carries has styles that are not supported: "
            + ", ".join(f"{style} ({pattern})" for pattern, style in unknown.items()),
            hint="give a tensor_plan in the recipe, or use plan.mesh.shard",
            field="plan.mesh.tensor",
            found=unknown,
            allowed=list(THEIR_STYLES),
        )
    _check_heads(model, plan.mesh.tensor)
    return {pattern: THEIR_STYLES[style] for pattern, style in theirs.items()}


def _check_heads(model: nn.Module, tensor: int) -> None:
    """Refuse to cut a Hugging Face model's heads apart."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(text, key, None)
        if isinstance(number, int) and number % tensor:
            raise _not_divided(f"the model has {number} {key}", number, tensor)


def _check_divides(name: str, layer: nn.Module, style: str, tensor: int) -> None:
    """Refuse a layer that a style cannot divide, and one whose shares would differ where the next layer needs alike."""
    if not style.startswith(("colwise", "rowwise", "vocabulary")):
        return
    if not isinstance(layer, (nn.Linear, nn.Embedding)):
        raise InputError(
            f"{FIELD}: {name} is a {type(layer).__name__}, and {style} divides only Linear and Embedding",
            hint="name the layers inside it",
            field=FIELD,
            found={name: style},
        )
    extra = sorted(key for key, _ in layer.named_parameters() if key not in ("weight", "bias"))
    if extra:
        raise InputError(
            f"{FIELD}: {name} has {', '.join(extra)} beside its weight, which {style} does not divide",
            field=FIELD,
            found={name: style},
        )
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
        raise InputError(
            f"{FIELD}: {name} has max_norm, scale_grad_by_freq or sparse gradients, which need the whole table",
            hint=f'leave it whole: "{name}": replicate',
            field=FIELD,
            found={name: style},
        )
    linear = isinstance(layer, nn.Linear)
    size = layer.weight.shape[1 if linear == style.startswith("rowwise") else 0]
    in_rows = style.startswith("vocabulary") or style == "colwise_gather" or (not linear and style.startswith("row"))
    if size % tensor and not in_rows:
        raise _not_divided(f"{name}, which is {style}, has {size} numbers", size, tensor)


def _not_divided(what: str, number: int, tensor: int) -> InputError:
    most = max(ways for ways in range(1, tensor) if number % ways == 0)
    return InputError(
        f"plan.mesh.tensor: found {tensor}, but {what}: {tensor} ranks cannot share them evenly",
        hint=f"use plan.mesh.tensor={most}",
        field="plan.mesh.tensor",
        found=tensor,
        allowed=f"a divisor of {number}",
    )


def _unknown_style(pattern: str, style: str) -> InputError:
    allowed = [*STYLES, REPLICATE]
    close = nearest(style, allowed)
    return InputError(
        f"{FIELD}: found {style!r} for {pattern!r}. Allowed: {', '.join(allowed)}"
        + (f"; did you mean {close!r}?" if close else ""),
        field=FIELD,
        found=style,
        allowed=allowed,
        nearest=close,
    )


@torch.no_grad()
def _share_values(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all ranks of the group the first one's parameters and buffers, whatever their constructors drew."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and tensor.numel():
            values = tensor.contiguous()
            dist.broadcast(values, group=mesh.get_group(), group_src=0)
            tensor.copy_(values)


def _places_of_parameters(model: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """For each tied parameter, all the layers that have it, with the layers' names and what they call it."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, layer in model.named_modules():
        for key, parameter in layer.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((name, layer, key))
    return [found for found in places.values() if len(found) > 1]


def _tie_again(tied: list[list[tuple[str, nn.Module, str]]]) -> None:
    """Each layer was given a share of its own; layers with a tied parameter hold the first one's again."""
    for (first, holder, key), *others in tied:
        kept = getattr(holder, key)
        for name, layer, other_key in others:
            found = getattr(layer, other_key)
            if _placement(found) != _placement(kept):
                raise InputError(
                    f"{FIELD}: {first} and {name} share one weight, of which each rank would hold "
                    f"{_placement(kept)} for the one and {_placement(found)} for the other",
                    hint="an embedding that is rowwise fits an output that is colwise or colwise_gather",
                    field=FIELD,
                    found=[first, name],
                )
            setattr(layer, other_key, kept)


def _placement(parameter: Tensor) -> str:
    if not isinstance(parameter, DTensor) or parameter.placements[0].is_replicate():
        return "all of it"
    return "some rows" if parameter.placements[0].is_shard(0) else "some columns"


def _divide_loss(head: nn.Module, output: nn.Module, mesh: DeviceMesh) -> None:
    """Let a head compute its loss from divided logits; without targets, it still returns whole ones."""
    assert hasattr(head, "loss"), f"{type(head).__name__} has no loss to replace"
    first = local_part(cast(Tensor, output.weight)).offset[0]
    group = mesh.get_group()

    def loss(layer: nn.Module, x: Tensor, targets: Tensor, training: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        return vocabulary_loss(layer(x), targets, training, first=first, group=group)

    head.loss = loss  # type: ignore[assignment]
    head.register_forward_hook(_whole)


def _whole(module: nn.Module, inputs: object, output: object) -> object:
    return output.full_tensor() if isinstance(output, DTensor) else output


def _check_length(output: Tensor) -> None:
    """Before a sum is scattered over the sequence; shares of unequal length would be taken for equal ones."""
    assert isinstance(output, DTensor)
    if output.shape[1] % (ways := output.device_mesh.size()):
        raise InputError(
            f"plan.sequence_parallel: a sequence of {output.shape[1]} tokens cannot be cut into {ways} slices",
            hint="set plan.sequence_parallel to false, or make sequences a multiple of "
            f"{ways} tokens long (plan.mesh.tensor)",
            field="plan.sequence_parallel",
            found=output.shape[1],
            allowed=f"a multiple of {ways}",
        )
