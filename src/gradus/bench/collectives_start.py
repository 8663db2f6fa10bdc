"""Starting the benchmark of collectives: on this machine, on the nodes of the allocation that this is in, or on the
processes that srun or mpirun has started; and what comes out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradus.bench.ranks import leads, said_by_ranks
from gradus.bench.result import BenchResult, bench_environment
from gradus.hardware.detect import detect_machine
from gradus.launcher.slurm.step import other_nodes
from gradus.record.chart import Chart, Series
from gradus.record.format import count_text
from gradus.schema.errors import InputError

_RANK_MODULE = "gradus.bench.collectives_rank"


@dataclass(frozen=True)
class Asked:
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str
    backend: str | None = None  # None: NCCL between GPUs, else gloo


def doubling(smallest: int, largest: int, factor: int = 4) -> tuple[int, ...]:
    """Sizes from the smallest to the largest, each so many times the one before."""
    if smallest > largest:
        raise InputError(
            f"--from: found {smallest}, which is more than --to {largest}",
            field="--from",
            found=smallest,
            allowed=largest,
        )
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def collectives(asked: Asked, nproc: int | None) -> Iterator[dict[str, Any]]:
    """What rank 0 says, line by line: first on what, then the rows. In a process that only takes part, nothing."""
    if asked.backend == "mpi":
        from gradus.bench.collectives_mpi import said_by_mpi

        return said_by_mpi(asked.operations, asked.sizes, asked.dtype)
    gpus = len(detect_machine().gpus)
    if asked.backend == "nccl" and not gpus and other_nodes() is None:
        raise InputError(
            "--backend: found nccl, but there is no GPU here",
            hint="--backend gloo",
            field="--backend",
            found="nccl",
            allowed="gloo",
        )
    alone = other_nodes() is None and leads() is None
    if alone and nproc is None and gpus == 1:
        raise InputError(
            "--nproc: there is one GPU here, and a collective needs two ranks",
            hint="CUDA_VISIBLE_DEVICES= gradus bench collectives measures two ranks on the CPU",
            field="--nproc",
            found="1 GPU",
            allowed="2 GPUs or more, or none",
        )
    return said_by_ranks(_RANK_MODULE, asdict(asked), nproc or (2 if alone and gpus == 0 else None))


def result_of(asked: Asked, place: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> BenchResult:
    by_operation = {operation: [row for row in rows if row["operation"] == operation] for operation in asked.operations}

    def series(key: str, factor: float = 1.0) -> tuple[Series, ...]:
        return tuple(
            Series(name, [float(row["bytes"]) for row in found], [factor * row[key] for row in found])
            for name, found in by_operation.items()
            if found
        )

    ranks = rows[0]["ranks"]
    where = f"{count_text(ranks, 'rank')}, {place.get('backend')} on {place.get('device')}"
    charts = (
        Chart("Bus bandwidth", "size, bytes", "GB/s", series("bus_gb_per_second"), log_x=True, points=True),
        Chart("Latency", "size, bytes", "µs", series("seconds", 1e6), log_x=True, log_y=True, points=True),
    )
    best = {
        f"{name} bus_gb_per_second": max(row["bus_gb_per_second"] for row in found)
        for name, found in by_operation.items()
        if found
    }
    return BenchResult(
        "collectives",
        f"Collectives, {where}",
        {**asdict(asked), **place, "ranks": ranks},
        [dict(row) for row in rows],
        {**best, "wrong": sum(row["wrong"] for row in rows)},
        charts,
        bench_environment(),
    )
