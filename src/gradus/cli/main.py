"""The command line. Verbs import what they need when they run, so that help is quick and needs no torch."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gradus.cli.bench import app as bench_app
from gradus.cli.checkpoint import app as checkpoint_app
from gradus.cli.cluster import app as cluster_app
from gradus.cli.data import app as data_app
from gradus.cli.options import (
    AcceptChangedDataOption,
    JsonOption,
    ProfileOption,
    ResumeOption,
    RunIdOption,
    RunsOption,
    SetOption,
)
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

app.add_typer(bench_app, name="bench")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(cluster_app, name="cluster")
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
    resume: ResumeOption = None,
    run_id: RunIdOption = None,
    runs: RunsOption = "runs",
    debug: Annotated[bool, typer.Option("--debug", help="One rank in this process; a debugger works.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything, make one step, and leave nothing behind.")
    ] = False,
    here: Annotated[bool, typer.Option("--here", help="Train here, even if this looks like a login node.")] = False,
    time: Annotated[
        str | None, typer.Option("--time", metavar="1h30m", help="Stop, saved, before so much time is over.")
    ] = None,
    retries: Annotated[
        int,
        typer.Option("--retries", min=0, help="Start again so often in a row, if it fails without a new checkpoint."),
    ] = 0,
    accept_changed_data: AcceptChangedDataOption = False,
    profile: ProfileOption = None,
    json: JsonOption = False,
) -> None:
    """Train a recipe here, or run a script that expects torchrun: gradus train [OPTIONS] -- script.py ARGS."""
    from gradus.cli.train import TrainOptions, train_command

    options = TrainOptions(
        recipe,
        context.obj,
        nproc,
        cluster,
        tuple(set_),
        resume,
        run_id,
        runs,
        debug,
        dry_run,
        here,
        time,
        json,
        accept_changed_data=accept_changed_data,
        retries=retries,
        profile=profile,
    )
    raise typer.Exit(run_command(lambda: train_command(options), json))


@app.command()
def submit(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help="A recipe.yaml; not needed with --resume.")] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="A cluster file, or a named cluster. Default: this Slurm's nodes.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", "-N", min=1, help="Nodes. Default: the fewest on which a plan fits.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Ranks on each node. Default: its GPUs, else 1.")
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", "-t", metavar="1h30m", help="The job's time limit; it goes on afterwards.")
    ] = None,
    set_: SetOption = [],  # noqa: B006
    sweep: Annotated[
        list[str],
        typer.Option("--sweep", metavar="KEY=V1,V2", help="A run for each value, and each combination: an array job."),
    ] = [],  # noqa: B006
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script, and submit nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end, as gradus train does.")] = False,
    after: Annotated[
        list[str], typer.Option("--after", metavar="JOB|RUN", help="Start when that one has ended well.")
    ] = [],  # noqa: B006
    sbatch: Annotated[
        list[str], typer.Option("--sbatch", metavar='"--any=option"', help="Any further option of sbatch.")
    ] = [],  # noqa: B006
    partition: Annotated[str | None, typer.Option("--partition", "-p", help="Where the job goes.")] = None,
    account: Annotated[str | None, typer.Option("--account", "-A", help="Who pays.")] = None,
    qos: Annotated[str | None, typer.Option("--qos", help="Quality of service.")] = None,
    reservation: Annotated[str | None, typer.Option("--reservation", help="Nodes that were reserved.")] = None,
    constraint: Annotated[str | None, typer.Option("--constraint", "-C", help="Features of the nodes.")] = None,
    nodelist: Annotated[str | None, typer.Option("--nodelist", "-w", help="Nodes that must be among them.")] = None,
    exclude: Annotated[str | None, typer.Option("--exclude", "-x", help="Nodes that must not be.")] = None,
    begin: Annotated[str | None, typer.Option("--begin", "-b", help="Not before: 20:00, now+1hour.")] = None,
    exclusive: Annotated[bool, typer.Option("--exclusive", help="Share the nodes with nobody.")] = False,
    resume: ResumeOption = None,
    run_id: RunIdOption = None,
    runs: RunsOption = "runs",
    preflight: Annotated[bool, typer.Option("--preflight", help="Test the nodes before the run begins.")] = False,
    retries: Annotated[
        int, typer.Option("--retries", min=0, help="Attempts in a row that may fail without a new checkpoint.")
    ] = 3,
    accept_changed_data: AcceptChangedDataOption = False,
    profile: ProfileOption = None,
    json: JsonOption = False,
) -> None:
    """Train a recipe as a job of Slurm, or any script: gradus submit [OPTIONS] -- script.py ARGS."""
    from gradus.cli.submit import SubmitOptions, submit_command

    scheduler = {
        "time": time,
        "partition": partition,
        "account": account,
        "qos": qos,
        "reservation": reservation,
        "constraint": constraint,
        "nodelist": nodelist,
        "exclude": exclude,
        "begin": begin,
        **({"exclusive": True} if exclusive else {}),
    }
    options = SubmitOptions(
        recipe,
        context.obj,
        cluster,
        nodes,
        nproc,
        scheduler,
        tuple(sbatch),
        tuple(after),
        overrides=tuple(set_),
        sweep=tuple(sweep),
        resume=resume,
        run_id=run_id,
        runs=runs,
        preflight=preflight,
        retries=retries,
        accept_changed_data=accept_changed_data,
        profile=profile,
        dry_run=dry_run,
        wait=wait,
        as_json=json,
    )
    raise typer.Exit(run_command(lambda: submit_command(options), json))


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
        list[str] | None,
        typer.Argument(metavar="[RUN | stop|cancel|release|logs|why RUN]", help="A path, an id or a name."),
    ] = None,
    runs: RunsOption = "runs",
    export: Annotated[
        str | None, typer.Option("--export", help="Write the metrics for: tensorboard, mlflow, wandb, prometheus.")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="WHERE", help="With --export: a folder, a file or an URI.")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="With stop or cancel: end it at once, without a save.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="With logs: what this rank printed.")] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="With logs: of an earlier attempt.")] = None,
    lines: Annotated[int, typer.Option("--lines", min=1, help="With logs: so many of each node.")] = 40,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="With logs: go on while the run does.")] = False,
    json: JsonOption = False,
) -> None:
    """List runs, show one; stop it (saved), cancel it, release it, see its logs, or ask why it is as it is."""
    from gradus.cli.runs import RunsOptions, runs_command

    options = RunsOptions(tuple(words or ()), runs, export, to, now, rank, attempt, lines, follow, json)
    raise typer.Exit(run_command(lambda: runs_command(options), json))


@app.command()
def watch(
    run: Annotated[
        str | None, typer.Argument(help="A path, an id or a name. With --web it may be left out: all runs.")
    ] = None,
    runs: RunsOption = "runs",
    once: Annotated[bool, typer.Option("--once", help="Show how it is now, and leave.")] = False,
    every: Annotated[
        float | None, typer.Option("--every", metavar="SECONDS", help="Look so often. Default: 2, elsewhere 10.")
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="Serve live pages for a browser, and metrics.")] = False,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="With --web: where. Default: a free one.")] = 0,
    bind: Annotated[str, typer.Option("--bind", help="With --web: on which address.")] = "127.0.0.1",
    token_file: Annotated[
        str | None, typer.Option("--token-file", metavar="FILE", help="With --web: a token that stays the same.")
    ] = None,
    textfile: Annotated[
        str | None, typer.Option("--textfile", metavar="FOLDER", help="With --web: also metrics for node-exporter.")
    ] = None,
    export: Annotated[
        str | None, typer.Option("--export", help="Send metrics as they come to: tensorboard, mlflow, wandb.")
    ] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="WHERE", help="With --export: a folder or an URI.")] = None,
    json: JsonOption = False,
) -> None:
    """Show a run as it goes on, local or on a cluster, until it is over. Ctrl-C leaves the run alone."""
    from gradus.cli.watch_options import WatchOptions, watch_as_told

    options = WatchOptions(run, runs, once, every, web, port, bind, token_file, textfile, export, to, json)
    raise typer.Exit(run_command(lambda: watch_as_told(options), json))


@app.command()
def explain(
    target: Annotated[str, typer.Argument(metavar="RUN|TRACE", help="A path, an id or a name; or a trace file.")],
    runs: RunsOption = "runs",
    json: JsonOption = False,
) -> None:
    """Say what slowed a run down or ended it: verdict, evidence, the exact change, and what that could gain."""
    from gradus.cli.explain import explain_command

    raise typer.Exit(run_command(lambda: explain_command(target, runs, json), json))


@app.command()
def report(
    targets: Annotated[
        list[str], typer.Argument(metavar="RUN|RESULT", help="A path, an id or a name; or a benchmark's JSON file.")
    ],
    compare: Annotated[
        list[str],
        typer.Option("--compare", metavar="RUN", help="Compare RUN, the baseline, with these; several may follow."),
    ] = [],  # noqa: B006
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE", help="Where to. Default: report.html in RUN, or comparison.html."),
    ] = None,
    runs: RunsOption = "runs",
    json: JsonOption = False,
) -> None:
    """Write a page about a run that opens offline: findings, curves, where time and memory went, how to repeat it."""
    from gradus.cli.report import ReportOptions, report_command

    options = ReportOptions(tuple(targets), tuple(compare), out, runs, json)
    raise typer.Exit(run_command(lambda: report_command(options), json))


@app.command()
def tune(
    recipe: Annotated[str, typer.Argument(help="A recipe.yaml. It is read, never written.")],
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="A cluster that this machine is a node of. Default: this machine.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Ranks on this machine. Default: the GPUs, else 1.")
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="Begin no new knob after so long.")] = 10.0,
    knobs: Annotated[
        str | None,
        typer.Option(
            "--knobs",
            help="Try only these, separated by commas: workers, micro_batch, recompute, compile, channels_last, "
            "bucket, precision, narrow_weights, loss_chunks, cuda_graph.",
        ),
    ] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="Write the whole plan with reasons.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Trials that decide, of each side, in turns.")] = 3,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Of timed steps in each trial.")] = 3.0,
    trial_seconds: Annotated[
        float, typer.Option("--trial-seconds", min=1, help="A trial that takes longer is ended.")
    ] = 300.0,
    memory_gib: Annotated[
        float | None, typer.Option("--memory-gib", min=0.01, help="On a CPU: what a rank may take. Default: most.")
    ] = None,
    findings: Annotated[
        bool, typer.Option("--findings/--no-findings", help="Begin with what gradus explain finds in a short run.")
    ] = True,
    set_: SetOption = [],  # noqa: B006
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Also write a page.")] = None,
    json: JsonOption = False,
) -> None:
    """Measure the knobs of a recipe's plan here, keep what helps, and show each step with its gain."""
    from gradus.cli.tune import TuneOptions, tune_command

    options = TuneOptions(
        recipe,
        cluster,
        nproc,
        minutes,
        tuple(set_),
        knobs,
        out,
        repeats,
        seconds,
        trial_seconds,
        memory_gib,
        findings,
        html,
        json,
    )
    raise typer.Exit(run_command(lambda: tune_command(options), json))


@app.command()
def preflight(
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="A cluster file, or a named cluster: what is promised.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="How many nodes. Default: those of this job, else 1.")
    ] = None,
    runs: RunsOption = "runs",
    json: JsonOption = False,
) -> None:
    """Check in under a minute whether nodes are fit for a run, and name the node or link that is not."""
    from gradus.cli.preflight import preflight_command

    raise typer.Exit(run_command(lambda: preflight_command(cluster, nodes, runs, json), json))


@app.command()
def drill(
    target: Annotated[str, typer.Argument(metavar="RUN|RECIPE", help="A run that is alive, or a recipe to test with.")],
    inject: Annotated[
        str,
        typer.Option(
            "--inject",
            metavar="KIND",
            help="kill-rank, kill-node, hang, slow-rank, preempt, timeout, disk-full, corrupt-checkpoint or nan.",
        ),
    ],
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="To which rank. Default: the last one.")] = None,
    nproc: Annotated[int | None, typer.Option("--nproc", min=1, help="Ranks of a test run (on each node).")] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="Submit the test run there.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", "-N", min=1, help="Nodes of a test run.")] = None,
    set_: SetOption = [],  # noqa: B006
    patience: Annotated[str, typer.Option("--patience", metavar="10m", help="Give up waiting after so long.")] = "10m",
    runs: RunsOption = "runs",
    here: Annotated[bool, typer.Option("--here", help="Even if this looks like a login node.")] = False,
    json: JsonOption = False,
) -> None:
    """Do something bad to a run, and report whether and how fast it recovered, and what was lost."""
    from gradus.cli.drill import DrillOptions, drill_command

    options = DrillOptions(target, inject, rank, nproc, cluster, nodes, tuple(set_), patience, runs, here, json)
    raise typer.Exit(run_command(lambda: drill_command(options), json))


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
    if arguments[:1] not in (["train"], ["submit"]) or "--" not in arguments:
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
