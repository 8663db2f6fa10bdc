"""`gradus data`: get datasets to where there is no network, and look at what a recipe trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gradus.cli.byte_progress import byte_progress
from gradus.cli.data_audit import audit
from gradus.cli.data_shards import pack, stats, verify
from gradus.cli.data_stage import stage
from gradus.cli.options import JsonOption, SetOption
from gradus.cli.output import print_json, run_command, shown

app = typer.Typer(
    no_args_is_help=True,
    help="Fetch, pack and verify datasets, and show what a recipe trains on.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (pack, stats, verify, audit, stage):
    app.command()(command)


@app.command()
def fetch(
    what: Annotated[str, typer.Argument(metavar="NAME|URL", help="mnist, cifar10, or an address.")],
    sha256: Annotated[str | None, typer.Option("--sha256", metavar="HEX", help="The file's checksum.")] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="FOLDER", help="Default: data/NAME, or data.")] = None,
    base: Annotated[str | None, typer.Option("--from", metavar="URL", help="A mirror of a known dataset.")] = None,
    unpack: Annotated[bool, typer.Option("--unpack", help="Unpack a tar or zip archive from an address.")] = False,
    json: JsonOption = False,
) -> None:
    """Download a dataset, checked, on a machine that has a network."""
    raise typer.Exit(run_command(lambda: _fetch(what, sha256, to, base, unpack, json), json))


@app.command()
def show(
    recipe: Annotated[str, typer.Argument(help="A recipe.yaml.")],
    set_: SetOption = [],  # noqa: B006
    sample: Annotated[int, typer.Option("--sample", min=0, help="Which training sample to show.")] = 0,
    json: JsonOption = False,
) -> None:
    """How many samples and tokens a recipe trains on, and one of them. Text is tokenised if it has not been yet."""
    raise typer.Exit(run_command(lambda: _show(recipe, set_, sample, json), json))


def _fetch(what: str, sha256: str | None, to: str | None, base: str | None, unpack: bool, as_json: bool) -> int:
    from gradus.data.fetch import fetch

    with byte_progress() as reporter:
        fetched = fetch(what, Path(to) if to else None, sha256, base, unpack, reporter)
    if as_json:
        files = [
            {"path": str(f.path), "size_bytes": f.size_bytes, "sha256": f.sha256, "new": f.new} for f in fetched.files
        ]
        unpacked = [str(path) for path in fetched.unpacked]
        print_json({"folder": str(fetched.folder), "files": files, "unpacked": unpacked, "recipe": fetched.recipe})
        return 0
    for file in fetched.files:
        how = "downloaded" if file.new else "was there"
        print(f"{shown(file.path)}: {how}, {file.size_bytes:,} bytes, sha256 {file.sha256}")
    if not sha256 and fetched.recipe is None:
        print("not checked: no --sha256 was given")
    for path in fetched.unpacked:
        print(f"{shown(path)}: {path.stat().st_size:,} bytes")
    if fetched.recipe:
        print(f"\nin a recipe:\n  {fetched.recipe}")
    return 0


def _show(path: str, overrides: list[str], number: int, as_json: bool) -> int:
    from gradus.planner.resolve import resolved
    from gradus.schema.recipe import Recipe

    recipe = resolved(Recipe.load(path, overrides))
    with recipe.blamed():
        document = _described(recipe, number)
    if as_json:
        print_json(document)
        return 0
    parts = document.pop("sample")
    width = max(map(len, document))
    for key, value in document.items():
        if value is not None:
            print(f"{key.replace('_', ' '):<{width}}  {f'{value:,}' if isinstance(value, int) else value}")
    if isinstance(parts, str):
        print(f"\ntraining sample {number}:\n{parts}")
        return 0
    explained = "" if all(part["in_loss"] for part in parts) else ", [[not in the loss]]"
    print(f"\ntraining sample {number}{explained}:")
    print("".join(part["text"] if part["in_loss"] else f"[[{part['text']}]]" for part in parts))
    return 0


def _described(recipe: Any, number: int) -> dict[str, Any]:
    from gradus.schema.errors import InputError
    from gradus.training.building import open_data

    train = open_data(recipe, "train")
    assert train is not None
    validation = open_data(recipe, "validation")
    if number >= train.length:
        raise InputError(
            f"--sample: found {number}, there are {train.length}", field="--sample", allowed=f"0 to {train.length - 1}"
        )
    source = train.source
    return {
        "data": recipe.data.use,
        "path": recipe.data.options.get("path"),
        "training_samples": train.length,
        "validation_samples": validation.length if validation else 0,
        "tokens_per_sample": source.tokens_per_sample if source else None,
        "vocabulary": source.vocabulary if source else None,
        "classes": source.classes if source else None,
        "tokenizer_hash": source.tokenizer_hash if source else None,
        "note": train.note,
        "sample": _sample(recipe, train, number),
    }


def _sample(recipe: Any, data: Any, number: int) -> list[dict[str, Any]] | str:
    """The text of a sample in pieces, each in the loss or not; for other data its shapes."""
    import numpy as np
    import torch

    from gradus.data.readable import readable
    from gradus.data.source import source_options
    from gradus.data.sources.shards import PackedShards
    from gradus.data.sources.stdlib import StdlibText
    from gradus.data.sources.tokenised import TokenisedOptions
    from gradus.data.tokenizer import Bytes
    from gradus.planner.resolve import data_options

    batch = data.finish(data.fetch(np.array([number])), torch.float32)
    options = source_options(recipe.data.use, data_options(recipe)) if data.source is not None else None
    tokenizer = None
    if isinstance(options, (TokenisedOptions, StdlibText)):
        tokenizer = options.prepare().tokenizer if isinstance(options, TokenisedOptions) else Bytes()
    elif isinstance(options, PackedShards):
        tokenizer = options.readable_by()
    if tokenizer is not None:
        return [part._asdict() for part in readable(data.source, batch, tokenizer)]
    named = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return "\n".join(
        f"  {name}: {value.dtype} {list(value.shape[1:])}" if hasattr(value, "shape") else f"  {name}: {value}"
        for name, value in named
    )
