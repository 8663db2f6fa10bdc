"""Options that several verbs have."""

from __future__ import annotations

from typing import Annotated

import typer

SetOption = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change any key of the recipe.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
RunsOption = Annotated[str, typer.Option("--runs", metavar="FOLDER", help="Where run directories are.")]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="steps=5",
        help="Record a trace of some steps: steps=5,from=10,ranks=0,stacks,memory.",
    ),
]
ResumeOption = Annotated[str | None, typer.Option("--resume", metavar="RUN", help="Go on with a run.")]
RunIdOption = Annotated[str | None, typer.Option("--run-id", help="Name the run's folder.")]
AcceptChangedDataOption = Annotated[
    bool, typer.Option("--accept-changed-data", help="With --resume: go on, though the data is not what it was.")
]
