"""State: the model and the optimizer as named tensors and plain numbers, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradus.checkpoint.base import base_of, fingerprint_tensor
from gradus.checkpoint.own_names import by_own_names, own_name
from gradus.checkpoint.reading import DTYPES, files_kept_open, read_rows, read_tensor
from gradus.checkpoint.tensor_file import StoredTensor
from gradus.checkpoint.weights import ADAPTER_MARK, MODEL_PREFIX
from gradus.parallel.part import local_part, put_rows
from gradus.parallel.world import World
from gradus.schema.errors import InputError

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # as torch names those of AdamW
OPTIMIZER_PREFIX = "optimizer."
_KERNELS = ("foreach", "fused")  # of a parameter group: how it is computed on a machine, not what


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name (`model.<parameter>`, `optimizer.<parameter>.<key>`), and what of the optimizer is no tensor.

    They are whole logical tensors, of which this rank may hold a part. Of a model with adapters only what is trained,
    and the buffers; a fingerprint stands for the rest.
    """
    base = base_of(model)
    tensors = {f"{MODEL_PREFIX}{name}": tensor for name, tensor in _saved_tensors(model).items()}
    tensors |= fingerprint_tensor(base) if base else {}
    numbers: dict[str, Any] = {}
    parameters = _trained(model)
    for name, state in _optimizer_states(model, optimizer).items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                _check_divided_alike(name, key, value, parameters[name])
                tensors[f"{OPTIMIZER_PREFIX}{name}.{key}"] = value
            elif value is None or isinstance(value, (int, float, str)):
                numbers.setdefault(name, {})[key] = value
            else:
                raise InputError(
                    f"optimizer: its state {key!r} of {name} is a {type(value).__name__}, which a checkpoint cannot "
                    "hold; allowed: tensors, numbers and text",
                    field="optimizer.use",
                )
    return tensors, {"parameters": numbers, "groups": _groups(model, optimizer)}


Saved = Mapping[str, Tensor | StoredTensor]


def restore_model(model: nn.Module, tensors: Saved, world: World | None = None) -> None:
    """Put saved weights and buffers back in place. Names and shapes must be those of this model.

    Of tensors in a file, each rank reads what it holds and no more. Of a model in stages, all ranks must call it.
    """
    expected = _saved_tensors(model)
    names = _over_stages(expected.keys(), world)  # before anything is read: a rank that finds damage leaves here
    _check_base(model, tensors)
    saved = {name.removeprefix(MODEL_PREFIX): t for name, t in tensors.items() if name.startswith(MODEL_PREFIX)}
    if saved.keys() != names:
        missing, unexpected = sorted(names - saved.keys()), sorted(saved.keys() - names)
        raise InputError(
            f"the checkpoint is of another model: missing {missing[:5]}, unexpected {unexpected[:5]}", field="model"
        )
    for name, tensor in expected.items():
        if tensor.shape != torch.Size(saved[name].shape):
            raise InputError(
                f"the checkpoint is of another model: {name} is {tuple(saved[name].shape)} there and "
                f"{tuple(tensor.shape)} here",
                field="model",
            )
    with files_kept_open():
        for name, tensor in expected.items():
            put(tensor, saved[name])


@torch.no_grad()
def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Saved, numbers: Mapping[str, Any], *, groups: bool
) -> None:
    """Put the optimizer's state back. With `groups`, also what some optimizers keep in their parameter groups."""
    of_parameters = by_own_names(numbers["parameters"])
    if groups:
        _restore_groups(model, optimizer, numbers["groups"])
    by_parameter: dict[str, dict[str, Tensor | StoredTensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(OPTIMIZER_PREFIX):
            parameter_name, _, key = name.removeprefix(OPTIMIZER_PREFIX).rpartition(".")
            by_parameter.setdefault(parameter_name, {})[key] = tensor
    _check_none_lacks(model, optimizer, by_parameter, of_parameters)
    with files_kept_open():
        for name, parameter in _trained(model).items():
            state: dict[str, Any] = dict(of_parameters.get(name, {}))
            wanted = _moments_dtype(optimizer, parameter)
            for key, tensor in by_parameter.get(name, {}).items():
                placed = _placed(tensor, parameter, optimizer)
                state[key] = placed.to(wanted) if wanted is not None and key in MOMENTS else placed
            if state:
                optimizer.state[parameter] = state


def _moments_dtype(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.dtype | None:
    """Of a recipe's adamw, whose moments may have been saved in another format; an own optimizer's stay as they are."""
    ours: torch.dtype | None = getattr(optimizer, "state_dtype", None)
    is_torchs = type(optimizer) is torch.optim.AdamW or getattr(optimizer, "takes_narrow_gradients", False)
    return parameter.dtype if ours is None and is_torchs else ours


def _check_none_lacks(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Mapping[str, Any]],
    numbers: Mapping[str, Mapping[str, Any]],
) -> None:
    """An optimizer keeps the same for parameters of a group that have as many dimensions; or nothing for one that has
    never had a gradient. One that has some of it and not the rest would go on wrong, without a word.
    """
    names = {parameter: name for name, parameter in _trained(model).items()}
    for group in optimizer.param_groups:
        keys: dict[int, dict[str, set[str]]] = {}  # by the number of dimensions, and the parameter's name
        for parameter in group["params"]:
            if parameter in names:
                name = names[parameter]
                saved = {*tensors.get(name, ()), *numbers.get(name, ())}
                keys.setdefault(parameter.dim(), {})[name] = saved
        for alike in keys.values():
            most = max(alike, key=lambda name: len(alike[name]))
            for name, saved in alike.items():
                if saved and saved < alike[most]:
                    raise InputError(
                        f"optimizer: the checkpoint lacks {sorted(alike[most] - saved)} of {name}, which it has of "
                        f"{most}",
                        hint="go on from another checkpoint; gradus checkpoint list shows which there are",
                        field="optimizer",
                    )


def put(target: Tensor, saved: Tensor | StoredTensor) -> None:
    """Copy what this rank holds of a saved tensor, from memory or from a file."""
    if isinstance(saved, Tensor):
        put_rows(target, saved)
    else:
        read_rows(saved, target)


def _placed(saved: Tensor | StoredTensor, parameter: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    dtype = saved.dtype if isinstance(saved, Tensor) else DTYPES[saved.dtype]
    if torch.Size(saved.shape) == parameter.shape and parameter.dim() > 0:
        placed = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    else:
        # Step counters live on the host, except where the kernel that updates the parameter decides on the device
        # whether to: torch's fused optimizers, and LAMB.
        on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
        on_host = len(saved.shape) == 0 and not on_device and parameter.dim() > 0
        device = torch.device("cpu") if on_host else local_part(parameter).tensor.device
        placed = torch.empty(tuple(saved.shape), dtype=dtype, device=device)
    put(placed, saved)
    return placed


def _check_divided_alike(name: str, key: str, value: Tensor, parameter: Tensor) -> None:
    """What an optimizer keeps for a divided parameter must be divided with it, or be one number."""
    if isinstance(parameter, DTensor) and value.dim() and value.shape != parameter.shape:
        raise InputError(
            f"optimizer: its state {key!r} of {name} has shape {tuple(value.shape)}, and the parameter, which is "
            f"divided over ranks, {tuple(parameter.shape)}: it could not be put back on other ranks",
            hint="use an optimizer that keeps one number for each of a parameter's, such as adamw, or plan.zero=0",
            field="optimizer.use",
        )


def _over_stages(names: Iterable[str], world: World | None) -> set[str]:
    """The names that the stages of a pipeline have together."""
    if world is None or world.mesh.pipeline == 1:
        return set(names)
    stages: list[list[str]] = [[] for _ in range(world.mesh.pipeline)]
    dist.all_gather_object(stages, list(names), group=world.submesh("pipeline").get_group())
    return {name for stage in stages for name in stage}


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What is plain about each parameter group, and the names of its members on this rank."""
    names = {parameter: name for name, parameter in _trained(model).items()}
    return [
        {"names": [names[p] for p in group["params"] if p in names], "numbers": _group_numbers(group)}
        for group in optimizer.param_groups
    ]


def _restore_groups(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """By the names of their members: on another mesh there may be more groups, or fewer, of the same parameters."""
    for group, here in zip(optimizer.param_groups, _groups(model, optimizer), strict=True):
        members = set(here["names"])
        sources = [was for was in saved if members & set(map(own_name, was["names"]))]
        if any(was["numbers"] != sources[0]["numbers"] for was in sources[1:]):
            raise InputError(
                f"optimizer: a group of {len(members)} parameters was {len(sources)} groups with other settings in the "
                "checkpoint",
                hint="make it from the same groups as when the run began",
                field="optimizer",
                found=len(optimizer.param_groups),
                allowed=len(saved),
            )
        if sources:  # else they are of a stage that rank 0 did not have
            group.update({k: v for k, v in sources[0]["numbers"].items() if k not in _KERNELS})


def _group_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Plain numbers of a parameter group, without its learning rate: that is the schedule's or the script's own."""
    left_out = ("lr", "lr_factor", *_KERNELS)
    return {k: v for k, v in group.items() if isinstance(v, (bool, int, float, str)) and k not in left_out}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (a shared one once) and the buffers that are meant to be saved."""
    kept = model.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in kept})
    return tensors


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    base = base_of(model)
    return {name: t for name, t in model_tensors(model).items() if base is None or name not in base.names}


def _check_base(model: nn.Module, tensors: Saved) -> None:
    """Adapters mean something only beside the weights that they were trained with."""
    base, saved = base_of(model), tensors.get(ADAPTER_MARK)
    if (base is None) != (saved is None):
        found, now = ("a whole model", "adapters") if saved is None else ("adapters only", "a whole model")
        raise InputError(
            f"lora: the checkpoint holds {found}, and the recipe now asks for {now}",
            hint="start a new run for that; gradus checkpoint export merges adapters into a whole model",
            field="lora",
        )
    if base is None or saved is None:
        return
    fingerprint = saved if isinstance(saved, Tensor) else read_tensor(saved)
    if fingerprint.item() != base.fingerprint:
        raise InputError(
            "model.weights: the checkpoint's adapters were trained beside other weights than those that are loaded now",
            hint="bring back the file that model.weights named when the run began, and freeze the same parameters",
            field="model.weights",
        )


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _optimizer_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {name: optimizer.state[p] for name, p in _trained(model).items() if p in optimizer.state}
