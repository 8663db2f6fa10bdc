"""`gradus checkpoint`: what a run has saved, whether it is whole, in what two differ, and weights in and out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradus.checkpoint.chosen import chosen_folder
from gradus.checkpoint.manifest import DamagedCheckpoint, is_checkpoint, stored_tensors, verify_folder
from gradus.cli.byte_progress import byte_progress
from gradus.cli.options import JsonOption, RunsOption
from gradus.cli.output import print_json, run_command, shown
from gradus.launcher.saved import SavedCheckpoint, saved_checkpoints, uncommitted
from gradus.record.directory import RunDirectory
from gradus.record.format import bytes_text, count_text
from gradus.record.metrics import read_metrics
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED, InputError, unknown_name

if TYPE_CHECKING:
    from gradus.checkpoint.difference import Difference

LAYOUTS = ("gradus", "huggingface")
MOST_LINES = 10  # of one kind of difference; --json has all

app = typer.Typer(
    no_args_is_help=True,
    help="List, verify and compare checkpoints, import weights, export a trained model.",
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


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A run or a checkpoint.")],
    second: Annotated[str | None, typer.Argument(metavar="[B]", help="Another one. Default: the same run.")] = None,
    steps: Annotated[
        tuple[int, int] | None, typer.Option("--steps", metavar="M N", help="Of A and of B. Default: the newest.")
    ] = None,
    runs: RunsOption = "runs",
    json: JsonOption = False,
) -> None:
    """Compare two checkpoints, tensor by tensor. As `diff` does, exits with 0 if they are equal and with 1 if not."""
    raise typer.Exit(run_command(lambda: diff_command(first, second, steps, runs, json), json))


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
    shard_gb: Annotated[
        float, typer.Option("--shard-gb", min=0.001, help="Larger models become several files and an index.")
    ] = 5.0,
    recipe: RecipeOption = None,
    runs: RunsOption = "runs",
    json: JsonOption = False,
) -> None:
    """Write a trained model as safetensors that need nothing of gradus to be read."""
    options = ExportOptions(run, Path(out), layout, step, adapter, shard_gb, recipe, runs, json)
    raise typer.Exit(run_command(lambda: export_command(options), json))


def list_command(run: str, runs: str, as_json: bool) -> int:
    found = _checkpoints(run, runs)
    if as_json:
        print_json([_document(checkpoint) for checkpoint in found])
        return EXIT_FINISHED
    for one in found:
        when = f"{one.saved_at:%Y-%m-%d %H:%M:%S} UTC" if one.committed and one.saved_at else "not committed"
        parts = count_text(one.parts, "part")
        mesh = str(one.mesh) if one.mesh else ""
        damaged = "  DAMAGED: gradus checkpoint verify" if one.looks_damaged else ""
        size = bytes_text(one.size_bytes)
        print(f"step {one.step:>8}  {size:>10}  {parts:>9}  {when:<23}  {mesh}  {shown(one.path)}{damaged}")
    if not found:
        print(f"{run} has no checkpoint yet")
    return EXIT_FINISHED


def verify_command(run: str, runs: str, as_json: bool) -> int:
    documents = []
    with byte_progress() as reporter:
        for one in _checkpoints(run, runs):
            alone = is_checkpoint(Path(run))
            if not one.committed and not alone:  # it is no checkpoint yet, or not any more, and so not a damaged one
                documents.append({**_document(one), "whole": None, "damage": []})
                if not as_json:
                    print(f"step {one.step:>8}  not committed: no checkpoint, and never used")
                continue
            damage = [str(found) for found in one.damage(reporter(f"step {one.step}"))]
            documents.append({**_document(one), "whole": not damage, "damage": damage})
            if not as_json:
                print(f"step {one.step:>8}  {'DAMAGED' if damage else 'whole'}")
                for line in damage:
                    print(f"  {line}")
    if as_json:
        print_json(documents)
    elif not documents:
        print(f"{run} has no checkpoint yet")
    return EXIT_FAILED if any(document["whole"] is False for document in documents) else EXIT_FINISHED


def diff_command(first: str, second: str | None, steps: tuple[int, int] | None, runs: str, as_json: bool) -> int:
    if second is None and steps is None:
        raise InputError(
            "diff: one checkpoint has nothing to be compared with",
            hint="name a second run or checkpoint, or two steps of this one: --steps 100 200",
            field="B",
        )
    of_first, of_second = steps or (None, None)
    a, b = chosen_folder(_path(first, runs), of_first), chosen_folder(_path(second or first, runs), of_second)
    manifests = [verify_folder(path, every_byte=False) for path in (a, b)]
    from gradus.checkpoint.difference import difference

    of_a, of_b = (
        (_with_rate(path, manifest), stored_tensors(path, manifest))
        for path, manifest in zip((a, b), manifests, strict=True)
    )
    with byte_progress() as reporter:
        found = difference(of_a, of_b, reporter("compared"))
    if as_json:
        print_json({"first": str(a), "second": str(b), **found.document()})
    else:
        print(f"a: {shown(a)}\nb: {shown(b)}")
        for line in _difference_lines(found):
            print(line)
    return EXIT_FINISHED if found.same else EXIT_FAILED


def _difference_lines(found: Difference) -> list[str]:
    lines = [f"{count_text(found.equal, 'tensor')} equal"]
    other = [f"{one.name}: {_text(one.first)} in a, {_text(one.second)} in b" for one in found.state]
    kinds = [f"{one.name}: {one.first} in a, {one.second} in b" for one in found.kinds]
    # Apart, or else the counters of an optimizer would come before all weights.
    numbers: dict[str, list[str]] = {"model": [], "optimizer": [], "the rest": []}
    width = min(60, max((len(one.name) for one in found.numbers), default=0))
    for one in found.numbers:
        kind = one.name.partition(".")[0]
        numbers[kind if kind in numbers else "the rest"].append(
            f"{one.name:<{width}}  |a-b| {_number(one.largest)}  relative {_number(one.relative)}  "
            f"{one.different:,} of {one.elements:,} differ"
            + (f", {one.not_finite:,} not finite" if one.not_finite else "")
        )
    for title, entries in (
        ("other state", other),
        ("only in a", list(found.only_first)),
        ("only in b", list(found.only_second)),
        ("another shape or type", kinds),
        *((f"other numbers, {kind}", entries) for kind, entries in numbers.items()),
    ):
        if entries:
            lines += ["", f"{title}: {len(entries)}", *(f"  {entry}" for entry in entries[:MOST_LINES])]
            if len(entries) > MOST_LINES:
                lines.append(f"  … and {len(entries) - MOST_LINES} more: --json lists all")
    return lines


def _number(value: float | None) -> str:
    return f"{value:<9.3g}" if value is not None else f"{'-':<9}"


def _text(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _with_rate(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest, and the learning rate of its step: that is the schedule's, so that no checkpoint has it."""
    run = RunDirectory(path.absolute().parent.parent)
    if not run.metrics_path.exists():
        return manifest
    rates = [row["lr"] for row in read_metrics(run) if row["step"] <= manifest["step"] and row.get("lr") is not None]
    return {**manifest, **({"lr": rates[-1]} if rates else {})}


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


@dataclass(frozen=True)
class ExportOptions:
    run: str
    out: Path
    layout: str
    step: int | None
    adapter: bool
    shard_gb: float
    recipe: str | None
    runs: str
    as_json: bool


def export_command(options: ExportOptions) -> int:
    layout, adapter = options.layout, options.adapter
    if layout not in LAYOUTS:
        raise unknown_name("layout", layout, LAYOUTS, field="--layout")
    if adapter and layout != "gradus":
        raise InputError(
            "--adapter: adapters are written under their own names only", hint="leave out --layout", field="--adapter"
        )
    path = _path(options.run, options.runs)
    from gradus.schema.recipe import Recipe
    from gradus.training.exporting import export, open_saved

    recipe = Recipe.load(options.recipe) if options.recipe else None
    with _whole_one_named(path), byte_progress() as reporter:
        saved = open_saved(path, options.step, recipe)
        files = export(
            saved,
            options.out,
            "huggingface" if layout == "huggingface" else "gradus",
            adapter=adapter,
            shard_bytes=round(options.shard_gb * 1e9),
            report=reporter("exported"),
        )
    merged = saved.has_adapters and not adapter
    if options.as_json:
        written = [str(file) for file in files]
        print_json({"checkpoint": str(saved.path), "step": saved.step, "files": written, "merged": merged})
    else:
        print(f"step {saved.step} of {shown(saved.path)}{', adapters merged' if merged else ''}:")
        for file in files:
            print(f"  {shown(file.absolute())}  {bytes_text(file.stat().st_size)}")
    return EXIT_FINISHED


@contextmanager
def _whole_one_named(path: Path) -> Iterator[None]:
    """Who finds a checkpoint damaged hears which one of the run can be used."""
    try:
        yield
    except DamagedCheckpoint as error:
        if is_checkpoint(path):
            raise
        found = saved_checkpoints(RunDirectory(path))
        whole = next((one.step for one in reversed(found) if not one.looks_damaged and not one.damage()), None)
        hint = f"the newest whole one: --step {whole}" if whole is not None else "the run has no whole checkpoint"
        raise DamagedCheckpoint(error.message, hint=hint, **error.details) from error


def _path(run: str, runs: str) -> Path:
    return Path(run) if is_checkpoint(Path(run)) else RunDirectory.open(run, Path(runs)).path


def _checkpoints(run: str, runs: str) -> list[SavedCheckpoint]:
    """Of a run, in the order of their steps, also what is not committed; or the one that is named."""
    if is_checkpoint(Path(run)):
        name = Path(run).absolute().name.removeprefix("step-")
        return [SavedCheckpoint(int(name) if name.isdecimal() else -1, Path(run).absolute())]
    directory = RunDirectory.open(run, Path(runs))
    return sorted([*saved_checkpoints(directory), *uncommitted(directory)], key=lambda one: one.step)


def _document(checkpoint: SavedCheckpoint) -> dict[str, object]:
    saved_at = checkpoint.saved_at
    return {
        "step": checkpoint.step,
        "path": str(checkpoint.path),
        "committed": checkpoint.committed,
        "looks_damaged": checkpoint.looks_damaged,
        "size_bytes": checkpoint.size_bytes,
        "parts": checkpoint.parts,
        "mesh": checkpoint.mesh.model_dump() if checkpoint.mesh else None,
        "saved_at": saved_at.isoformat(timespec="seconds") if saved_at else None,
    }
