"""Exporting: a trained model as files that need nothing of ours to be read: safetensors, and config.json if it has one.

Of a run with adapters (lora) the base is built again and both are merged, unless the adapters alone are wanted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradus.checkpoint.chosen import chosen_folder
from gradus.checkpoint.manifest import stored_tensors, verify_folder
from gradus.checkpoint.reading import DTYPES, NAMES, read_tensor
from gradus.checkpoint.state import model_tensors, restore_model
from gradus.checkpoint.tensor_file import StoredTensor
from gradus.checkpoint.weights import ADAPTER_MARK, CONFIG, MODEL_PREFIX
from gradus.checkpoint.writing import Writable, write_tensors
from gradus.models import catalogue
from gradus.models.config_json import config_of
from gradus.models.layouts import Link, layout_of
from gradus.record.directory import RunDirectory
from gradus.schema.errors import InputError
from gradus.schema.recipe import OWN, Recipe
from gradus.training.building import build_model
from gradus.training.export_shards import SHARD_BYTES, Files, byte_count, sharded
from gradus.training.lora import adapted_layers, merge_adapters

ADAPTER, ADAPTER_SETTINGS = "adapter.safetensors", "adapter.json"
ExportLayout = Literal["gradus", "huggingface"]
Report = Callable[[int, int | None], None]  # bytes so far, and in all


@dataclass(frozen=True)
class Saved:
    """A checkpoint, whose bytes are verified as they are read, and the recipe that it was made by, where known."""

    path: Path
    step: int
    manifest: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    recipe: Recipe | None

    @property
    def has_adapters(self) -> bool:
        return ADAPTER_MARK in self.tensors

    @property
    def of_model(self) -> dict[str, StoredTensor]:
        return {n.removeprefix(MODEL_PREFIX): t for n, t in self.tensors.items() if n.startswith(MODEL_PREFIX)}


def open_saved(path: Path, step: int | None = None, recipe: Recipe | None = None) -> Saved:
    """The checkpoint that a run directory (its newest, unless `step` is given) or a checkpoint's folder stands for."""
    folder = chosen_folder(path, step)
    manifest = verify_folder(folder, every_byte=False)
    if recipe is None:
        recipe = _recipe_beside(folder)
    return Saved(folder, int(manifest["step"]), manifest, stored_tensors(folder, manifest), recipe)


def _whole_model(saved: Saved) -> nn.Module:
    """The model of a checkpoint, as it was trained, on the host."""
    recipe = _required_recipe(saved, "building the model")
    if recipe.model.use == OWN:
        raise InputError(
            f"model: {saved.path} holds adapters only, and the run's own loop made the model beside which they stand",
            hint="in Python, result.load_model(model=Net()) puts both together; --adapter writes the adapters alone; "
            "--recipe RECIPE may name a model",
            field="model",
            found=OWN,
        )
    floats = {t.dtype for t in saved.of_model.values() if DTYPES[t.dtype].is_floating_point}
    dtype = torch.float64 if "F64" in floats else torch.float32
    with recipe.blamed():
        model = build_model(recipe, torch.device("cpu"), dtype, load_weights=False)
    restore_model(model, saved.tensors)
    return model


def export(
    saved: Saved,
    out: Path,
    layout: ExportLayout = "gradus",
    *,
    adapter: bool = False,
    shard_bytes: int = SHARD_BYTES,
    report: Report | None = None,
) -> list[Path]:
    """Write a checkpoint's model to a new folder, one tensor at a time. The files that were written.

    What is larger than `shard_bytes` becomes several files and an index, as Hugging Face has it. A failure, and damage
    that shows while the checkpoint is read, leave nothing.
    """
    files: Files
    model: Any = None
    if adapter:
        files = _adapter_files(saved)
    elif layout == "gradus":
        files = sharded(_own_tensors(saved), shard_bytes)
    elif _has_our_layers(saved):
        files = _hugging_face_files(saved, shard_bytes)
    else:
        files, model = {}, _transformers_model(saved)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out: {out} exists already", hint="name a new folder", field="--out", found=str(out))
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        if model is not None:
            model.save_pretrained(out, max_shard_size=shard_bytes)
            return sorted(out.iterdir())
        _write(out, files, report)
    except BaseException as error:
        _remove_again(out, missing)
        if isinstance(error, OSError):
            raise InputError(f"--out: {out}: {error.strerror}", field="--out", found=str(out)) from error
        raise
    return [out / name for name in files]


def _write(out: Path, files: Files, report: Report | None) -> None:
    tensors = [t for content in files.values() if not isinstance(content, str) for t in content.values()]
    total, done = sum(byte_count(tensor) for tensor in tensors), 0

    def counted(tensor: Writable) -> Tensor:
        nonlocal done
        done += byte_count(tensor)
        if report is not None:
            report(done, total)
        return tensor.get()

    for name, content in files.items():
        if isinstance(content, str):
            (out / name).write_text(content)
        else:
            told = {n: Writable(t.dtype, t.shape, partial(counted, t)) for n, t in content.items()}
            write_tensors(out / name, told)


def _remove_again(out: Path, missing: list[Path]) -> None:
    """What was begun: the files in a folder that was empty, and the folders that were not there."""
    for file in out.iterdir() if out.is_dir() else ():
        if file.is_file():
            file.unlink()
    for folder in missing:
        with suppress(OSError):
            folder.rmdir()


def _own_tensors(saved: Saved) -> dict[str, Writable]:
    return {name: Writable(dtype, shape, get) for name, dtype, shape, get in _tensors(saved)}


def _hugging_face_files(saved: Saved, shard_bytes: int) -> Files:
    recipe = _required_recipe(saved, "--layout huggingface")
    _, settings = catalogue.resolve(recipe.model.use, recipe.model.options)
    layout = layout_of(settings)
    ours = {name: (dtype, shape, get) for name, dtype, shape, get in _tensors(saved)}
    tensors = {link.theirs: _linked(link, *ours[link.ours]) for link in layout.links}
    config = json.dumps(config_of(layout.name, settings), indent=2) + "\n"
    return {**sharded(tensors, shard_bytes), CONFIG: config}


def _has_our_layers(saved: Saved) -> bool:
    recipe = _required_recipe(saved, "--layout huggingface")
    return recipe.model.built_in and recipe.model.use != catalogue.HUGGINGFACE.name


def _transformers_model(saved: Saved) -> nn.Module:
    """The model as transformers itself writes it; adapters are merged into their layers."""
    use = _required_recipe(saved, "--layout huggingface").model.use
    model = _whole_model(saved) if use != OWN else None
    transformers = sys.modules.get("transformers")  # such a model has imported it
    if model is None or transformers is None or not isinstance(model, transformers.PreTrainedModel):
        what = "the model of your own loop" if model is None else f"{use} makes a {type(model).__name__}, which"
        raise InputError(
            f"--layout: {what} is not one of transformers; Hugging Face has names only for those, gpt and bert",
            hint="--layout gradus writes it under its own names"
            + (", which a transformers model takes as they are; --recipe RECIPE may name one" if model is None else ""),
            field="--layout",
            found="huggingface",
            allowed="gradus",
        )
    transformers.utils.logging.disable_progress_bar()
    merge_adapters(model)
    return model


def _linked(link: Link, dtype: str, shape: tuple[int, ...], get: Callable[[], Tensor]) -> Writable:
    """A tensor of theirs, taken out of one of ours."""
    rows = shape[0] if link.rows is None else link.rows

    def taken() -> Tensor:
        part = get()
        if link.runs is not None:
            part = torch.cat([part[run.ours : run.ours + run.rows] for run in link.runs])
        return part.T if link.transposed else part

    theirs = (rows, *shape[1:])
    return Writable(dtype, tuple(reversed(theirs)) if link.transposed else theirs, taken)


def _adapter_files(saved: Saved) -> Files:
    recipe = _required_recipe(saved, "--adapter")
    if not saved.has_adapters or recipe.lora is None:
        raise InputError(f"--adapter: {saved.path} has no adapters: the run had no lora", field="--adapter")
    tensors = {
        name: Writable(t.dtype, t.shape, partial(read_tensor, t))
        for name, t in saved.of_model.items()
        if name.endswith(("lora_a", "lora_b"))
    }
    about = {**recipe.lora.model_dump(), "model": recipe.model.model_dump(exclude_unset=True), "step": saved.step}
    return {ADAPTER: tensors, ADAPTER_SETTINGS: json.dumps(about, indent=2) + "\n"}


def _tensors(saved: Saved) -> Iterator[tuple[str, str, tuple[int, ...], Callable[[], Tensor]]]:
    """Name, type and shape of every tensor of the whole model, and how to get it when its turn comes."""
    if not saved.has_adapters:
        for name, stored in saved.of_model.items():
            yield name, stored.dtype, stored.shape, partial(read_tensor, stored)
        return
    for name, tensor in merged_tensors(_whole_model(saved)).items():
        yield name, NAMES[tensor.dtype], tuple(tensor.shape), tensor.clone


def merged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model without adapters that does the same as this one with them."""
    layers = adapted_layers(model)
    tensors = {name: t.detach() for name, t in model_tensors(model).items() if not name.endswith(("lora_a", "lora_b"))}
    return tensors | {f"{name}.weight" if name else "weight": layer.merged() for name, layer in layers.items()}


def _recipe_beside(checkpoint: Path) -> Recipe | None:
    """The recipe of the run whose folder the checkpoint lies in."""
    run = RunDirectory(checkpoint.absolute().parent.parent)
    if not (run.path / "attempts").is_dir() or not run.attempts:
        return None
    file = run.attempt_path(run.attempts[-1]) / "recipe.yaml"
    return Recipe.load(file) if file.exists() else None


def _required_recipe(saved: Saved, what: str) -> Recipe:
    if saved.recipe is None:
        raise InputError(
            f"{saved.path} does not lie in its run, and {what} needs the recipe",
            hint="give it with --recipe RECIPE",
            field="--recipe",
            found="nothing",
        )
    return saved.recipe
