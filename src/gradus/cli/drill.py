"""`gradus drill`: something bad is done to a run, and what comes of it is reported."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from gradus.bench.drill.drilling import Drilled, drill_recipe, drill_run
from gradus.bench.drill.injections import KINDS
from gradus.cli.output import print_json, shown
from gradus.launcher.attempt import deadline_in
from gradus.record.directory import RunDirectory
from gradus.record.format import duration_text
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED, InputError, unknown_name
from gradus.schema.intervals import seconds_of


@dataclass(frozen=True)
class DrillOptions:
    """What was typed after `gradus drill`."""

    target: str  # a run, or a recipe
    inject: str
    rank: int | None = None
    nproc: int | None = None
    cluster: str | None = None
    nodes: int | None = None
    overrides: tuple[str, ...] = ()
    patience: str = "10m"
    runs: str = "runs"
    here: bool = False
    as_json: bool = False

    @property
    def launch(self) -> list[str]:
        """How a test run is started: as a job where a cluster is named, else on this machine."""
        line = ["submit", "--cluster", self.cluster] if self.cluster else ["train", "--retries", "3"]
        line += ["--nodes", str(self.nodes)] if self.nodes is not None else []
        line += ["--nproc", str(self.nproc)] if self.nproc is not None else []
        line += ["--here"] if self.here and not self.cluster else []
        return [*line, "--runs", self.runs, *(word for override in self.overrides for word in ("--set", override))]


def drill_command(options: DrillOptions) -> int:
    if options.inject not in KINDS:
        raise unknown_name("injection", options.inject, KINDS, field="--inject")
    deadline_in(options.patience, "--patience")
    patience = seconds_of(options.patience)
    is_recipe = options.target.endswith((".yaml", ".yml"))
    _refuse_launch_options(options, is_recipe)
    if is_recipe:
        drilled = drill_recipe(
            options.target,
            options.inject,
            rank=options.rank,
            launch=options.launch,
            patience_seconds=patience,
            say=_say,
        )
    else:
        run = RunDirectory.open(options.target, Path(options.runs))
        drilled = drill_run(run, options.inject, rank=options.rank, patience_seconds=patience, say=_say)
    if options.as_json:
        print_json(drilled.document())
    else:
        print(_report(drilled))
    return EXIT_FINISHED if drilled.recovery.recovered else EXIT_FAILED


def _refuse_launch_options(options: DrillOptions, is_recipe: bool) -> None:
    """What says how a test run is started says nothing about one that is alive."""
    given = {
        "--nproc": options.nproc,
        "--cluster": options.cluster,
        "--nodes": options.nodes,
        "--set": options.overrides,
    }
    for name, value in given.items():
        if value and not is_recipe:
            raise InputError(
                f"{name}: found it together with a run, which has begun",
                hint=f"gradus drill {options.target} --inject {options.inject}",
                field=name,
                found=str(value),
            )
    if options.nodes is not None and options.cluster is None:
        raise InputError(
            "--nodes: found it without --cluster, but this machine is one node",
            hint="--cluster CLUSTER submits the test run",
            field="--nodes",
            found=options.nodes,
        )


def _report(drilled: Drilled) -> str:
    recovery = drilled.recovery
    spent = {
        "noticed after": recovery.seconds_to_notice,
        "first step again after": recovery.seconds_to_first_step,
        "as far as before after": recovery.seconds_to_catch_up,
    }
    lines = [
        f"{drilled.injected.kind}: {'recovered' if recovery.recovered else 'DID NOT RECOVER'}",
        f"  done        {drilled.injected.what}, at step {drilled.injected.step}",
        f"  then        {recovery.why}",
        *(f"  {name:<23} {duration_text(seconds)}" for name, seconds in spent.items() if seconds is not None),
    ]
    if recovery.lost_steps is not None:
        lines.append(f"  steps computed again    {recovery.lost_steps}")
    return "\n".join([*lines, f"  run         {shown(drilled.run.path)}"])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
