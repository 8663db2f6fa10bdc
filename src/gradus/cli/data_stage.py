"""`gradus data stage`: a node's own copy of the data, made before a run needs it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradus.cli.byte_progress import byte_progress
from gradus.cli.options import JsonOption, SetOption
from gradus.cli.output import print_json, run_command

if TYPE_CHECKING:
    from gradus.data.staging import Job, Staged


def stage(
    what: Annotated[str, typer.Argument(metavar="RECIPE|FOLDER", help="A recipe.yaml, or a file or folder of data.")],
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="FOLDER", help="Where to; auto: $SLURM_TMPDIR or $TMPDIR. Default: data.stage."),
    ] = None,
    set_: SetOption = [],  # noqa: B006
    json: JsonOption = False,
) -> None:
    """Copy data to this node's own disk, checked. What is there and whole is not copied again.

    Exits with 1 if something is left where it is, and says why.
    """
    raise typer.Exit(run_command(lambda: _stage(what, to, set_, json), json))


def _stage(what: str, to: str | None, overrides: list[str], as_json: bool) -> int:
    from gradus.data.staging import Job
    from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED

    with byte_progress() as reporter:
        job = Job(f"command {uuid.uuid4().hex}", reporter("staging"))
        results = _of_recipe(what, to, overrides, job) if _is_recipe(what) else _of_place(what, to or "auto", job)
    if as_json:
        print_json({"staged": [asdict(result) for result in results]})
    else:
        print("\n".join(_lines(results)))
    return EXIT_FINISHED if all(result.here for result in results) else EXIT_FAILED


def _is_recipe(what: str) -> bool:
    return what.endswith((".yaml", ".yml")) and Path(what).is_file()


def _of_recipe(path: str, to: str | None, overrides: list[str], job: Job) -> list[Staged]:
    from gradus.data.staging import AUTO, staged_block
    from gradus.planner.resolve import resolved
    from gradus.schema.recipe import Recipe

    recipe = resolved(Recipe.load(path, overrides))
    block = recipe.data.model_copy(update={"stage": to or recipe.data.stage or AUTO})
    with recipe.blamed():
        return staged_block(block, job)[1]


def _of_place(path: str, to: str, job: Job) -> list[Staged]:
    from gradus.data.shards.storage import is_remote
    from gradus.data.staging import Staged, stage_folder, stage_path
    from gradus.schema.errors import InputError

    if not is_remote(path) and not Path(path).exists():
        raise InputError(
            f"{path} does not exist", field="RECIPE|FOLDER", found=path, allowed="a recipe.yaml, a file or a folder"
        )
    folder, problem = stage_folder(to)
    return [stage_path(path, folder, to, job) if folder is not None else Staged(path, problem)]


def _lines(results: Iterable[Staged]) -> list[str]:
    lines = []
    for result in results:
        lines.append(result.note)
        if result.here:
            lines.append(f"  read it from there: --set data.{result.key}={result.path}")
    return lines or ["nothing to stage: this data is made on the spot"]
