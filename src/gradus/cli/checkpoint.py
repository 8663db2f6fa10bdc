"""`gradus checkpoint`: what a run has saved, whether it is whole, and weights in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradus.checkpoint.manifest import TENSORS, DamagedCheckpoint
from gradus.cli.options import JsonOption, RunsOption
from gradus.cli.output import print_json, run_command, shown
from gradus.launcher.saved import SavedCheckpoint, saved_checkpoints
from gradus.record.directory import RunDirectory
from gradus.record.format import bytes_text
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED, InputError, unknown_name

LAYOUTS = ("gradus", "huggingface")

app = typer.Typer(
    no_args_is_help=True,
    help="List and verify checkpoints, import weights, export a trained model.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run (a path, an id or a name) or a checkpoint.")]
RecipeOption = Annotated[str | None, typer.Option("--recipe", metavar="RECIPE", help="The recipe of the model.")]


@app.command("list")
def list_(run: RunArgument, runs: RunsOption = "runs", json: JsonOption = False) -> None:
    """List the checkpoints of a run."""
    raise typer.Exit(run_command(lambda: list_command(run, runs, json), json))


@app.command()
def verify(run: RunArgument, runs: RunsOption = "runs", json: JsonOption = False) -> None:
    """Compare every byte of a run's checkpoints with what was written. Exits with 1 if one is damaged."""
    raise typer.Exit(run_command(lambda: verify_command(run, runs, json), json))


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A .pt, .pth or .bin file with weights.")],
    out: Annotated[str, typer.Option("--out", metavar="FILE.safetensors", help="The file to write.")],
    recipe: RecipeOption = None,
    json: JsonOption = False,
) -> None:
    """Turn a pickled file of weights into safetensors, without running what is in it."""
    raise typer.Exit(run_command(lambda: import_command(Path(file), Path(out), recipe, json), json))


@app.command()
def export(
    run: RunArgument,
    out: Annotated[str, typer.Option("--out", metavar="FOLDER", help="A new folder.")],
    layout: Annotated[str, typer.Option("--layout", help="gradus, huggingface (transformers, gpt, bert).")] = "gradus",
    step: Annotated[int | None, typer.Option("--step", help="Of which step. Default: the newest.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the adapters of lora, not merged.")] = False,
    recipe: RecipeOption = None,
    runs: RunsOption = "runs",
    json: JsonOption = False,
) -> None:
    """Write a trained model as safetensors that need nothing of gradus to be read."""
    command = lambda: export_command(run, Path(out), layout, step, adapter, recipe, runs, json)  # noqa: E731
    raise typer.Exit(run_command(command, json))


def list_command(run: str, runs: str, as_json: bool) -> int:
    found = _checkpoints(run, runs)
    documents = [_document(checkpoint) for checkpoint in found]
    if as_json:
        print_json(documents)
        return EXIT_FINISHED
    for checkpoint in found:
        saved = f"{checkpoint.saved_at:%Y-%m-%d %H:%M:%S} UTC"
        print(f"step {checkpoint.step:>8}  {bytes_text(checkpoint.size_bytes):>10}  {saved}  {shown(checkpoint.path)}")
    if not found:
        print(f"{run} has no checkpoint yet")
    return EXIT_FINISHED


def verify_command(run: str, runs: str, as_json: bool) -> int:
    documents = []
    for checkpoint in _checkpoints(run, runs):
        damage = None
        try:
            checkpoint.verify()
        except DamagedCheckpoint as error:
            damage = error.message
        documents.append({**_document(checkpoint), "whole": damage is None, "damage": damage})
        if not as_json:
            print(f"step {checkpoint.step:>8}  {'whole' if damage is None else f'DAMAGED: {damage}'}")
    if as_json:
        print_json(documents)
    elif not documents:
        print(f"{run} has no checkpoint yet")
    return EXIT_FINISHED if all(document["whole"] for document in documents) else EXIT_FAILED


def import_command(file: Path, out: Path, recipe: str | None, as_json: bool) -> int:
    if out.suffix != ".safetensors":
        raise InputError(
            f"--out: found {out}, allowed: a name that ends in .safetensors", field="--out", found=str(out)
        )
    if out.exists():
        raise InputError(f"--out: {out} exists already", hint="name a new file", field="--out", found=str(out))
    from gradus.schema.recipe import Recipe
    from gradus.training.importing import import_weights

    tensors = import_weights(file, out, Recipe.load(recipe) if recipe else None)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    if as_json:
        print_json({"file": str(out), "tensors": len(tensors), "numbers": parameters, "fits": recipe})
    else:
        fits = f", which fit the model of {recipe}" if recipe else ""
        print(f"{shown(out.absolute())}: {len(tensors)} tensors with {parameters:,} numbers{fits}")
        print(f"in a recipe: model: {{..., weights: {shown(out.absolute())}}}")
    return EXIT_FINISHED


def export_command(
    run: str, out: Path, layout: str, step: int | None, adapter: bool, recipe: str | None, runs: str, as_json: bool
) -> int:
    if layout not in LAYOUTS:
        raise unknown_name("layout", layout, LAYOUTS, field="--layout")
    if adapter and layout != "gradus":
        raise InputError(
            "--adapter: adapters are written under their own names only", hint="leave out --layout", field="--adapter"
        )
    path = Path(run) if (Path(run) / TENSORS).exists() else RunDirectory.open(run, Path(runs)).path
    from gradus.schema.recipe import Recipe
    from gradus.training.exporting import export, open_saved

    saved = open_saved(path, step, Recipe.load(recipe) if recipe else None)
    files = export(saved, out, "huggingface" if layout == "huggingface" else "gradus", adapter=adapter)
    merged = saved.has_adapters and not adapter
    if as_json:
        written = [str(file) for file in files]
        print_json({"checkpoint": str(saved.path), "step": saved.step, "files": written, "merged": merged})
    else:
        print(f"step {saved.step} of {shown(saved.path)}{', adapters merged' if merged else ''}:")
        for file in files:
            print(f"  {shown(file.absolute())}  {bytes_text(file.stat().st_size)}")
    return EXIT_FINISHED


def _checkpoints(run: str, runs: str) -> list[SavedCheckpoint]:
    if (Path(run) / TENSORS).exists():
        name = Path(run).absolute().name.removeprefix("step-")
        return [SavedCheckpoint(int(name) if name.isdecimal() else -1, Path(run).absolute())]
    return saved_checkpoints(RunDirectory.open(run, Path(runs)))


def _document(checkpoint: SavedCheckpoint) -> dict[str, object]:
    return {
        "step": checkpoint.step,
        "path": str(checkpoint.path),
        "size_bytes": checkpoint.size_bytes,
        "saved_at": checkpoint.saved_at.isoformat(timespec="seconds"),
    }
