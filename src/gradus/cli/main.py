"""The command line. Verbs import what they need when they run, so that help is quick and needs no torch."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gradus.cli.checkpoint import app as checkpoint_app
from gradus.cli.data import app as data_app
from gradus.cli.options import JsonOption, RunsOption, SetOption
from gradus.cli.output import print_error, print_json, run_command
from gradus.schema.errors import EXIT_BAD_INPUT, EXIT_FAILED

app = typer.Typer(
    name="gradus",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Take a PyTorch model from one GPU to a supercomputer.",
)

app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(data_app, name="data")


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Take a PyTorch model from one GPU to a supercomputer."""
    if version:
        import gradus

        print(gradus.__version__)
        raise typer.Exit


@app.command()
def train(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help="A recipe.yaml; not needed with --resume.")] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Ranks on this machine. Default: the GPUs, else 1.")
    ] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="A cluster file. Default: this machine.")] = None,
    set_: SetOption = [],  # noqa: B006
    resume: Annotated[str | None, typer.Option("--resume", metavar="RUN", help="Go on with a run.")] = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="Name the run's folder.")] = None,
    runs: RunsOption = "runs",
    debug: Annotated[bool, typer.Option("--debug", help="One rank in this process; a debugger works.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything, make one step, and leave nothing behind.")
    ] = False,
    here: Annotated[bool, typer.Option("--here", help="Train here, even if this looks like a login node.")] = False,
    json: JsonOption = False,
) -> None:
    """Train a recipe here, or run a script that expects torchrun: gradus train [OPTIONS] -- script.py ARGS."""
    from gradus.cli.train import TrainOptions, train_command

    options = TrainOptions(
        recipe, context.obj, nproc, cluster, tuple(set_), resume, run_id, runs, debug, dry_run, here, json
    )
    raise typer.Exit(run_command(lambda: train_command(options), json))


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe.yaml.")],
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="A cluster file, or a named cluster. Default: this machine.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus", metavar="N", help="Plan for N GPUs, or for 4x8: 4 nodes of 8. Default: the fewest that fit."
        ),
    ] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", metavar="7d", help="Find the fewest GPUs that are done in time.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", help="Find the most GPUs for so much money, at the cluster's price.")
    ] = None,
    gpu_hours: Annotated[
        float | None, typer.Option("--gpu-hours", help="Find the most GPUs that take no more GPU-hours.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, max=10, help="Show at most so many plans.")] = 10,
    set_: SetOption = [],  # noqa: B006
    show_layout: Annotated[
        bool, typer.Option("--show-layout", help="Show node by node which rank holds which part.")
    ] = False,
    show_modules: Annotated[
        bool, typer.Option("--show-modules", help="Show what each module of the model computes, moves and keeps.")
    ] = False,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Also write a page with all plans and charts.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run a few steps here, and correct predictions by them.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Say how a recipe would be split over a cluster, whether it fits, how long it takes, and why."""
    from gradus.cli.plan import PlanOptions, plan_command

    options = PlanOptions(
        recipe,
        cluster,
        gpus,
        deadline=deadline,
        budget=budget,
        gpu_hours=gpu_hours,
        top=top,
        overrides=tuple(set_),
        show_layout=show_layout,
        show_modules=show_modules,
        html=html,
        measure=measure,
        as_json=json,
    )
    raise typer.Exit(run_command(lambda: plan_command(options), json))


@app.command("runs")
def runs_(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN | stop RUN [--now]]", help="A path, an id or a name.")
    ] = None,
    runs: RunsOption = "runs",
    export: Annotated[str | None, typer.Option("--export", help="Write the metrics for: tensorboard.")] = None,
    now: Annotated[bool, typer.Option("--now", help="With stop: end it at once, without a save.")] = False,
    json: JsonOption = False,
) -> None:
    """List runs, show one, or ask one to save and stop."""
    from gradus.cli.runs import runs_command

    raise typer.Exit(run_command(lambda: runs_command(words or [], runs, export, json, now=now), json))


@app.command()
def models(json: JsonOption = False) -> None:
    """List the reference models with their parameter counts."""
    from gradus.cli.models import models_command

    raise typer.Exit(run_command(lambda: models_command(json), json))


def main() -> None:
    """The `gradus` command."""
    if not sys.platform.startswith("linux"):
        sys.exit("gradus runs on Linux only")
    arguments, command = _split(sys.argv[1:])
    try:
        code = app(arguments, standalone_mode=False, obj=command)
    except Exception as error:
        code = _usage_error(error)
    sys.exit(code)


def _split(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """A user's own command comes after `--`, where nothing is an option of ours."""
    if arguments[:1] != ["train"] or "--" not in arguments:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _usage_error(error: Exception) -> int:
    """A wrong option or argument, as text or as JSON."""
    if isinstance(error, typer.Abort):
        return EXIT_FAILED
    # typer's own base class of usage errors has moved between releases; what it can do has not.
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        raise error
    if not format_message():  # no verb at all: the help was printed
        return EXIT_BAD_INPUT
    if "--json" in _split(sys.argv[1:])[0]:
        document = {"kind": "bad-input", "message": format_message(), "hint": "see gradus --help"}
        print_json({"error": document, "exit_code": EXIT_BAD_INPUT})
    else:
        print_error({"message": format_message(), "hint": "see gradus --help"})
    return EXIT_BAD_INPUT
