"""`gradus bench`: what the machine can do, one file for each benchmark."""

from __future__ import annotations

import typer

from gradus.cli.bench_batch_size import batch_size
from gradus.cli.bench_collectives import collectives
from gradus.cli.bench_device import device
from gradus.cli.bench_knobs import knobs
from gradus.cli.bench_loader import loader
from gradus.cli.bench_numerics import numerics
from gradus.cli.bench_precision import precision
from gradus.cli.bench_replicas import replicas
from gradus.cli.bench_scaling import scaling
from gradus.cli.bench_storage import storage
from gradus.cli.bench_synthetic import synthetic

app = typer.Typer(no_args_is_help=True, help="Measure what the machine can do.")

app.command()(synthetic)
app.command()(collectives)
app.command()(device)
app.command()(storage)
app.command()(loader)
app.command()(scaling)
app.command()(replicas)
app.command()(precision)
app.command()(numerics)
app.command()(knobs)
app.command("batch-size")(batch_size)
