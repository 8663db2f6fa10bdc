"""Importing weights: a pickled file as safetensors, checked against the model that it is for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gradus.checkpoint.pickled import read_pickled
from gradus.checkpoint.reading import NAMES
from gradus.checkpoint.tensor_file import StoredTensor
from gradus.checkpoint.weights import Weights
from gradus.checkpoint.writing import Writable, write_tensors
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.building import initial_model
from gradus.training.pretrained import assignments


def import_weights(file: Path, out: Path, recipe: Recipe | None = None) -> dict[str, Tensor]:
    """Write the tensors of a .pt, .pth or .bin file to `out`. With a recipe, they must fit its model."""
    tensors = read_pickled(file)
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES or tensor.layout != torch.strided:
            raise InputError(
                f"FILE: {file}: {name} is {tensor.dtype} and {tensor.layout}, which safetensors cannot hold",
                field="FILE",
                found=name,
            )
    if recipe is not None:
        with recipe.blamed():
            _check_fits(file, tensors, recipe)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(out, {name: Writable(NAMES[t.dtype], tuple(t.shape), t.clone) for name, t in tensors.items()})
    except OSError as error:
        raise InputError(f"--out: {out}: {error.strerror}", field="--out", found=str(out)) from error
    return tensors


def _check_fits(file: Path, tensors: dict[str, Tensor], recipe: Recipe) -> None:
    model = initial_model(recipe, torch.device("cpu"), torch.float32)
    shapes = {name: StoredTensor(NAMES[t.dtype], tuple(t.shape), ()) for name, t in tensors.items()}
    assignments(model, Weights(file, shapes), recipe.model.weights_skip)
