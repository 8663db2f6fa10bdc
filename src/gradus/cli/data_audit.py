"""`gradus data audit`: whether a run trained on every sample as often as it should have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradus.cli.options import JsonOption, RunsOption
from gradus.cli.output import print_json, run_command, shown

if TYPE_CHECKING:
    from gradus.data.audit import Audit, Finding, Stream
    from gradus.record.directory import RunDirectory

_MOST_SHOWN = 20


def audit(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A path, an id or a name.")],
    runs: RunsOption = "runs",
    json: JsonOption = False,
) -> None:
    """Prove from a run's own records that it trained on every sample as often as it should have.

    Exits with 0 if that is proven, and with 1 if something differs or cannot be known; both are named.
    """
    raise typer.Exit(run_command(lambda: _audit(run, runs, json), json))


def _audit(named: str, runs: str, as_json: bool) -> int:
    from gradus.checkpoint.manifest import committed_steps
    from gradus.data.audit import audit as compare
    from gradus.data.audit import plain_stream
    from gradus.data.lineage import read_records
    from gradus.record.directory import RunDirectory
    from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED, InputError

    run = RunDirectory.open(named, Path(runs))
    if not any((run.attempt_path(attempt) / "recipe.yaml").exists() for attempt in run.attempts):
        raise InputError(
            f"{run.path}: no attempt of this run has a recipe: what a script trains on, only the script knows",
            hint="a run of a recipe, or of a script with a loop of gradus.Run, can be audited",
            found=str(run.path),
        )
    why: list[str] = []  # a specification cannot be rebuilt

    def stream_of(attempt: int, described: Mapping[str, Any]) -> Stream | None:
        return plain_stream(described) or _opened(run, attempt, described, why)

    found = compare(read_records(run), max(committed_steps(run.checkpoints), default=None), stream_of)
    found.notes += dict.fromkeys(why)
    if as_json:
        print_json({"run": str(run.path), **found.document()})
    else:
        print("\n".join(_lines(run, found)))
    return EXIT_FAILED if found.findings else EXIT_FINISHED


def _opened(run: RunDirectory, attempt: int, described: Mapping[str, Any], why: list[str]) -> Stream | None:
    """The stream of an attempt whose order can only be known from its data, if that is still what it was."""
    from gradus.data.audit import Stream
    from gradus.data.orders import order_for
    from gradus.data.position import changes_between, specification_of
    from gradus.schema.errors import GradusError
    from gradus.schema.recipe import Recipe
    from gradus.training.building import open_data

    try:
        recipe = Recipe.load(run.attempt_path(attempt) / "recipe.yaml")
        data = open_data(recipe, "train")
        assert data is not None
        order = order_for(data, recipe.data, recipe.seed, recipe.batch)
    except (GradusError, ImportError, OSError) as error:
        why.append(f"attempt {attempt}: its data cannot be opened: {error}")
        return None
    changes = changes_between(described, specification_of(recipe, data, order))
    if changes:
        why.append(f"attempt {attempt}: {'; '.join(change.message for change in changes)}")
        return None
    names, starts = getattr(data.source, "names", None), getattr(data.source, "starts", None)
    if names is None or starts is None:  # no mixture
        return Stream(order, {"data": (0, data.length)})
    parts = {name: (int(starts[at]), int(starts[at + 1] - starts[at])) for at, name in enumerate(names)}
    return Stream(order, parts)


def _lines(run: RunDirectory, found: Audit) -> list[str]:
    looked = f"{found.samples:,} samples in {found.steps:,} steps, on up to {found.ranks} data ranks"
    verdict = "proven" if not found.findings else "NOT AS IT SHOULD BE" if found.differences else "not proven"
    lines = [f"{shown(run.path)}: {verdict}", looked]
    lines += [f"attempt {attempt}: steps {first} to {stop - 1}" for attempt, first, stop in found.attempts]
    if found.seen:
        width = max(len("source"), *(len(seen.name) for seen in found.seen))
        lines += ["", f"{'source':<{width}}  {'has':>12}  {'expected':>12}  {'found':>12}  each sample"]
        for seen in found.seen:
            each = f"{seen.fewest} times" if seen.fewest == seen.most else f"{seen.fewest} to {seen.most} times"
            numbers = f"{seen.samples:>12,}  {seen.expected:>12,}  {seen.found:>12,}"
            lines.append(f"{seen.name:<{width}}  {numbers}  {each}")
    if found.skipped:
        spans = ", ".join(f"{first} to {stop - 1}" for first, stop in found.skipped)
        lines += ["", f"positions that were left out: {spans}"]
    lines += _listed("differences", found.differences) + _listed("cannot be proven", found.unproven)
    return [*lines, *([""] if found.notes else []), *(f"note: {note}" for note in found.notes)]


def _listed(title: str, findings: list[Finding]) -> list[str]:
    if not findings:
        return []
    more = [f"  and {len(findings) - _MOST_SHOWN} more: --json"] if len(findings) > _MOST_SHOWN else []
    return ["", f"{title}:", *(f"  {finding.message}" for finding in findings[:_MOST_SHOWN]), *more]
