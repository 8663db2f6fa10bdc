"""`gradus cluster show`: what there is on this cluster, what of it is free, and when a job would start."""

from __future__ import annotations

from typing import Annotated

import typer

from gradus.cli.options import JsonOption
from gradus.cli.output import print_json, run_command
from gradus.record.format import count_text

_FRESH_SECONDS = 1.0  # it is a person who asks, once

app = typer.Typer(no_args_is_help=True, help="The cluster that commands here talk to.")


@app.callback()
def cluster() -> None:
    """The cluster that commands here talk to."""


@app.command()
def show(
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="A cluster file, or a named cluster: only its partition.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", "-N", min=1, help="When would a job of so many start?")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="With so many GPUs on each of its nodes.")] = None,
    time: Annotated[str | None, typer.Option("--time", "-t", metavar="1h30m", help="For so long.")] = None,
    json: JsonOption = False,
) -> None:
    """Print partitions, limits, what is free, your jobs, and the earliest start for a shape."""
    raise typer.Exit(run_command(lambda: _show(cluster, nodes, gpus, time, json), json))


def _show(name: str | None, nodes: int | None, gpus: int | None, time: str | None, as_json: bool) -> int:
    from gradus.launcher.slurm.checks import check_scheduler, read_site
    from gradus.launcher.slurm.queue import queue
    from gradus.launcher.slurm.site_view import Shape, site_view
    from gradus.schema.cluster import Cluster
    from gradus.schema.loading import validated
    from gradus.schema.scheduler import Scheduler

    known = Cluster.load(name) if name else None
    if known is not None:
        check_scheduler(known)
    shape = None
    if nodes is not None or gpus is not None or time is not None:
        limit = validated(Scheduler, {"time": time}, "gradus cluster show").time if time else None
        default = known.gpus_per_node if known is not None else 0
        shape = Shape(nodes or 1, default if gpus is None else gpus, limit)
    view = site_view(read_site(), queue(_FRESH_SECONDS), known, shape)
    if as_json:
        print_json(view.document())
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("partition", "state", "nodes free", "GPUs free", "CPUs free", "on a node", "longest", "most nodes"):
        table.add_column(column, no_wrap=True)
    for one in view.partitions:
        kinds = f" {'/'.join(one.gpu_types)}" if one.gpu_types else ""
        on_a_node = (
            f"{one.gpus_per_node}{kinds} GPUs, {one.cpus_per_node} CPUs" if one.gpus else f"{one.cpus_per_node} CPUs"
        )
        table.add_row(
            one.name + ("*" if one.is_default else ""),
            one.state.lower(),
            f"{one.nodes_free}/{one.nodes}",
            f"{one.gpus_free}/{one.gpus}" if one.gpus else "-",
            f"{one.cpus_free}/{one.cpus}",
            on_a_node,
            one.max_time or "no limit",
            str(one.max_nodes or "no limit"),
        )
    console = Console()
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    Console(width=max(console.width, needed)).print(table)
    print(f"\nyour jobs: {view.running} running, {view.queued} queued")
    if shape is not None:
        with_gpus = f" of {shape.gpus_per_node} GPUs" if shape.gpus_per_node else ""
        print(f"\na job of {count_text(shape.nodes, 'node')}{with_gpus} would start")
    for earliest in view.possible:
        when = f"{earliest.start.at:%Y-%m-%d %H:%M:%S} on {earliest.start.nodes}" if earliest.start else "not"
        print(f"  in {earliest.partition}: {earliest.refused or when}")
    for note in view.notes:
        print(f"note: {note}")
    return 0
