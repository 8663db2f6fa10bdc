"""`gradus data pack | stats | verify`: shards written, looked at, and checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradus.cli.byte_progress import byte_progress
from gradus.cli.options import JsonOption, SetOption
from gradus.cli.output import print_json, run_command, shown
from gradus.schema.byte_size import byte_size
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED, InputError, unknown_name

if TYPE_CHECKING:
    from gradus.data.shards.origins import Origin
    from gradus.schema.recipe import Recipe

KINDS = ("auto", "images", "text", "jsonl", "parquet", "dataset")
MOST_CLASSES = 20  # that are listed for people; --json has all
MOST_DAMAGE = 20

WorkersOption = Annotated[int | None, typer.Option("--workers", min=1, help="Processes. Default: the cores.")]


def pack(
    paths: Annotated[
        list[str], typer.Argument(metavar="[SOURCE] DEST", help="Files or a folder, and where the shards go.")
    ],
    shard_size: Annotated[str, typer.Option("--shard-size", help="The largest size of a tar file.")] = "256MiB",
    workers: WorkersOption = None,
    kind: Annotated[str, typer.Option("--kind", help=f"What SOURCE is: {', '.join(KINDS)}.")] = "auto",
    use: Annotated[
        str | None, typer.Option("--use", metavar="FILE.py:NAME", help="Pack a dataset of your own, not SOURCE.")
    ] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="Pack the dataset of a recipe, not SOURCE.")] = None,
    set_: SetOption = [],  # noqa: B006
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Store tokens in place of text: `bytes`, or a tokenizer file.")
    ] = None,
    tiktoken_pattern: Annotated[str | None, typer.Option("--tiktoken-pattern", help="gpt2 or cl100k.")] = None,
    end_of_text: Annotated[str | None, typer.Option("--end-of-text", help="The token that ends a document.")] = None,
    keep_text: Annotated[bool, typer.Option("--keep-text", help="Store the text beside its tokens.")] = False,
    text: Annotated[str, typer.Option("--text", metavar="COLUMN", help="The column that is the document.")] = "text",
    columns: Annotated[
        str | None, typer.Option("--columns", metavar="A,B", help="Only these columns. Default: all.")
    ] = None,
    pattern: Annotated[str | None, typer.Option("--pattern", help="Which files of a folder.")] = None,
    validation: Annotated[
        float, typer.Option("--validation", min=0, max=0.999, help="Hold out this fraction, now and for good.")
    ] = 0.0,
    json: JsonOption = False,
) -> None:
    """Turn images, text, JSONL, Parquet or a dataset into tar shards with an index. Goes on after a kill."""

    def command() -> int:
        from gradus.data.shards.packing import HowToPack

        how = HowToPack(byte_size(shard_size, "--shard-size"), tokenizer, tiktoken_pattern, end_of_text, keep_text)
        chosen = tuple(columns.split(",")) if columns else None
        source, dest = _source_and_dest(paths, use or recipe)
        if source is None:
            origin: Origin = _own_dataset(use, recipe, set_, validation, text)
            return _pack(origin, use or recipe or "", Path(dest), how, workers, json)
        with _as_typed():
            origin = _origin(source, dest, kind, pattern, validation, text, chosen)
            return _pack(origin, source, Path(dest), how, workers, json)

    raise typer.Exit(run_command(command, json))


def stats(
    what: Annotated[str, typer.Argument(metavar="DEST|RECIPE", help="A packed dataset, or a recipe.yaml.")],
    set_: SetOption = [],  # noqa: B006
    json: JsonOption = False,
) -> None:
    """Count samples, bytes, classes and tokens; show how long documents and how large images are."""
    raise typer.Exit(run_command(lambda: _stats(what, set_, json), json))


def verify(
    dest: Annotated[str, typer.Argument(metavar="DEST", help="A packed dataset.")],
    workers: WorkersOption = None,
    json: JsonOption = False,
) -> None:
    """Compare every byte with the index. Exits with 1 if anything is damaged, and names it."""
    raise typer.Exit(run_command(lambda: _verify(dest, workers, json), json))


@contextmanager
def _as_typed() -> Iterator[None]:
    """An error about a key of a recipe, from what reads files for both, in the words of the command."""
    words = {"data.path": "SOURCE", "data.field": "--text"}
    words |= {f"data.{name}": f"--{name}" for name in ("pattern", "tokenizer")}
    words |= {"data.tiktoken_pattern": "--tiktoken-pattern", "data.end_of_text": "--end-of-text"}
    try:
        yield
    except InputError as error:
        told = {name: getattr(error, name) for name in ("message", "hint")} | error.details
        for recipe_word, word in words.items():
            told = {key: t.replace(recipe_word, word) if isinstance(t, str) else t for key, t in told.items()}
        raise InputError(**told) from error


def _source_and_dest(paths: list[str], dataset: str | None) -> tuple[str | None, str]:
    wanted = 1 if dataset else 2
    if len(paths) != wanted:
        form = "DEST (the dataset is named by --use or --recipe)" if dataset else "SOURCE DEST"
        message = f"found {len(paths)} paths, allowed: {form}"
        raise InputError(message, field="SOURCE", found=paths, allowed=form)
    return (None, paths[0]) if dataset else (paths[0], paths[1])


def _origin(
    source: str,
    dest: str,
    kind: str,
    pattern: str | None,
    validation: float,
    text: str,
    columns: tuple[str, ...] | None,
) -> Origin:
    from gradus.data.shards.origins import ImageFolders, Records
    from gradus.data.shards.origins.images import holds_images

    if kind not in KINDS:
        raise unknown_name("kind", kind, KINDS, field="--kind")
    if kind == "dataset":
        message = "--kind: a dataset is named by --use FILE.py:NAME or --recipe"
        raise InputError(message, field="--kind", found=kind, allowed="--use or --recipe")
    folder = Path(source)
    if folder.is_dir() and Path(dest).resolve().is_relative_to(folder.resolve()):
        message = f"DEST: {dest} lies in SOURCE; what is packed would become a part of it"
        raise InputError(message, field="DEST", found=dest, allowed="another folder")
    if kind == "images" or (kind == "auto" and pattern is None and holds_images(folder)):
        if not folder.is_dir():
            raise InputError(f"SOURCE: {folder} is no folder", field="SOURCE", found=source, allowed="a folder")
        return ImageFolders(folder, validation)
    return Records(source, pattern, validation, text, columns, None if kind == "auto" else kind)


def _own_dataset(use: str | None, recipe: str | None, overrides: list[str], validation: float, text: str) -> Origin:
    from gradus.data.shards.origins import OwnDataset
    from gradus.planner.resolve import resolved
    from gradus.schema.recipe import Recipe

    if use and recipe:
        raise InputError("--use: a recipe is given as well", field="--use", found=use, allowed="--use or --recipe")
    if recipe:
        found = Recipe.load(recipe, overrides)
        found = resolved(found) if found.data.built_in else found
    else:
        document = {"name": "pack", "data": {"use": use, "validation": validation}, "batch": 1, "steps": 1}
        found = Recipe.from_document(document, "--use", overrides)
    return OwnDataset(found.data.use, partial(open_split, found), found.seed, _digest_of(found), text)


def open_split(recipe: Recipe, split: Any) -> Any:
    """The samples of one split, opened in whichever process asks."""
    from gradus.training.building import open_data

    with recipe.blamed():
        opened = open_data(recipe, split)
    return None if opened is None else opened.dataset


def _digest_of(recipe: Recipe) -> str:
    """What changes when the code or the options of a dataset do."""
    import hashlib
    import json

    file = Path(recipe.data.use.rpartition(":")[0])
    code = hashlib.sha256(file.read_bytes()).hexdigest() if file.suffix == ".py" and file.is_file() else ""
    options = json.dumps(recipe.data.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256((code + options).encode()).hexdigest()


def _pack(origin: Origin, source: str, dest: Path, how: Any, workers: int | None, as_json: bool) -> int:
    from gradus.data.shards.packing import pack

    with byte_progress() as reporter:
        packed = pack(origin, dest, how, workers=workers, report=reporter("packing"))
    description = packed.description
    size = sum(shard.bytes for shard in description.shards)
    document = {
        "path": str(packed.folder),
        "source": source,
        "content": description.content,
        "samples": dict(description.samples),
        "shards": len(description.shards),
        "shards_written": packed.new,
        "shards_kept": packed.kept,
        "bytes": size,
        "parts": [part.name for part in description.parts],
        "classes": description.class_count,
        "tokens": description.tokens.count if description.tokens else None,
        "fingerprint": description.fingerprint,
    }
    if as_json:
        print_json(document)
        return EXIT_FINISHED
    kept = f", {packed.kept} of them were there" if packed.kept else ""
    in_shards = f"{size:,} bytes in {len(description.shards)} shards{kept}"
    print(f"{shown(packed.folder)}: {_counted(description.samples)}, {in_shards}")
    print(f"each sample: {', '.join(part.name for part in description.parts)}")
    if description.tokens:
        print(f"tokens: {description.tokens.count:,} by {description.tokens.tokenizer}")
    further = {"images": ", size: 224", "text": ", context: 1024", "samples": ""}[description.content]
    print(f"\nin a recipe:\n  data: {{use: shards, path: {shown(packed.folder)}{further}}}")
    return EXIT_FINISHED


def _counted(samples: Any) -> str:
    parts = [f"{count:,} {split} samples" for split, count in samples.items() if count]
    return " and ".join(parts)


def _stats(what: str, overrides: list[str], as_json: bool) -> int:
    from gradus.data.shards.reading import Shards
    from gradus.data.shards.stats import dataset_stats

    is_recipe = what.endswith((".yaml", ".yml"))
    document = _recipe_stats(what, overrides) if is_recipe else dataset_stats(Shards(what))
    if as_json:
        print_json(document)
    else:
        _print_stats(document)
    return EXIT_FINISHED


def _recipe_stats(path: str, overrides: list[str]) -> dict[str, Any]:
    from gradus.data.shards.stats import dataset_stats, source_stats, tokens_stats
    from gradus.data.source import source_options
    from gradus.data.sources.shards import PackedShards
    from gradus.data.sources.tokenised import TokenisedOptions
    from gradus.planner.resolve import data_options, resolved
    from gradus.schema.recipe import Recipe
    from gradus.training.building import open_data

    recipe = resolved(Recipe.load(path, overrides))
    with recipe.blamed():
        splits = {split: open_data(recipe, split) for split in ("train", "validation")}
        found = source_stats({split: data.dataset for split, data in splits.items() if data is not None})
        packed: dict[str, Any] = {}
        if recipe.data.built_in:
            options = source_options(recipe.data.use, data_options(recipe))
            packed = dataset_stats(options.shards) if isinstance(options, PackedShards) else {}
            if isinstance(options, TokenisedOptions):
                found |= tokens_stats(options.prepare())
    return {"recipe": path, "data": recipe.data.use, **found, **({"packed": packed} if packed else {})}


def _print_stats(document: dict[str, Any], indent: str = "") -> None:
    for key, value in document.items():
        name = f"{indent}{key.replace('_', ' ')}"
        if key == "packed":
            print(f"{name}:")
            _print_stats(value, indent + "  ")
        elif key == "classes" and isinstance(value, dict):
            shown_classes = list(value.items())[:MOST_CLASSES]
            more = f", and {len(value) - MOST_CLASSES} more" if len(value) > MOST_CLASSES else ""
            print(f"{name}: {len(value)}: " + ", ".join(f"{label} {count:,}" for label, count in shown_classes) + more)
        elif key == "parts":
            for part in value:
                size = f"{part['bytes']:,} bytes in {part['samples']:,} samples"
                print(f"{indent}part {part['name']} ({', '.join(part['suffixes'])}): {size}")
        elif isinstance(value, dict) and "histogram" in value:
            numbers = ", ".join(f"{each} {value[each]:,}" for each in ("min", "median", "p95", "max"))
            print(f"{name}: {numbers}")
            most = max(row["count"] for row in value["histogram"])
            for row in value["histogram"]:
                print(
                    f"{indent}  up to {row['up_to']:>13,}  {row['count']:>13,}  {'#' * round(40 * row['count'] / most)}"
                )
        elif key == "image_sizes" and isinstance(value, dict) and "width" in value:
            sides = "; ".join(
                f"{s} {value[s]['min']} to {value[s]['max']}, median {value[s]['median']}" for s in ("width", "height")
            )
            print(f"{name}: {sides} ({value['looked_at']:,} looked at)")
        elif isinstance(value, dict):
            print(f"{name}: " + ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in value.items()))
        elif value is not None:
            print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")


def _verify(dest: str, workers: int | None, as_json: bool) -> int:
    from gradus.data.shards.verify import verify

    with byte_progress() as reporter:
        found = verify(dest, workers, reporter("verifying"))
    if as_json:
        damage = [each.document() for each in found.damage]
        print_json(
            {"path": dest, "samples": found.samples, "bytes": found.bytes, "whole": not damage, "damage": damage}
        )
    elif found.damage:
        for each in found.damage[:MOST_DAMAGE]:
            print(f"damaged: {each}")
        if len(found.damage) > MOST_DAMAGE:
            print(f"and {len(found.damage) - MOST_DAMAGE:,} more; --json lists all")
    else:
        print(f"{dest}: {found.samples:,} samples, {found.bytes:,} bytes: every one is as it was packed")
    return EXIT_FAILED if found.damage else EXIT_FINISHED
