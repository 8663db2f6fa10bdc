"""The same collectives through MPI itself (mpi4py), from host memory: what the site's MPI makes of its network.

The processes are those that mpirun or srun has started: MPI knows no others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from gradus.bench.collectives import DTYPES, Operation, Row, pattern, summed
from gradus.schema.errors import InputError

_DTYPES = ("float32", "float64", "int32", "int64")  # MPI has no type for the half-precision ones
_SECONDS_EACH, _MOST_CALLS = 0.5, 1000
_CPU = torch.device("cpu")

Array = np.ndarray[Any, Any]


def said_by_mpi(operations: Sequence[str], sizes: Sequence[int], dtype: str) -> Iterator[dict[str, Any]]:
    """What rank 0 says: first on what, then the rows; the other ranks measure along and say nothing."""
    if dtype not in _DTYPES:
        raise InputError(
            f"--dtype: found {dtype}, which MPI has no type for, allowed: {', '.join(_DTYPES)}",
            field="--dtype",
            found=dtype,
            allowed=list(_DTYPES),
        )
    world = _world()
    if world.size < 2:
        raise InputError(
            "--backend: found mpi, but MPI sees one process alone",
            hint="mpirun -n 2 gradus bench collectives --backend mpi; under Slurm: srun --mpi=pmix -n 2 gradus ...",
            field="--backend",
            found="1 process",
            allowed="at least 2",
        )
    leads = world.rank == 0
    if leads:
        yield {"device": "cpu", "backend": "mpi", "mpi": _version()}
    for operation in operations:
        for size in sizes:
            row = measured(world, operation, size, dtype)  # type: ignore[arg-type]
            if leads:
                yield {"row": row.document()}


def measured(world: Any, operation: Operation, size: int, dtype: str) -> Row:
    """One row: a call that is checked, then as many as fit into half a second."""
    from mpi4py import MPI

    call, check = _prepared(world, operation, size, dtype)
    item = np.dtype(dtype).itemsize
    elements = max(world.size, size // item // world.size * world.size)
    call()
    wrong = world.allreduce(check(), op=MPI.SUM)
    once = world.allreduce(_timed(call, 1), op=MPI.MAX)
    calls = max(1, min(_MOST_CALLS, int(_SECONDS_EACH / max(once, 1e-9))))
    world.Barrier()
    each = world.allreduce(_timed(call, calls) / calls, op=MPI.MAX)
    return Row(operation, dtype, elements * item, world.size, each, int(wrong))


def _timed(call: Callable[[], None], calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - begun


def _prepared(world: Any, operation: Operation, size: int, dtype: str) -> tuple[Callable[[], None], Callable[[], int]]:
    """What makes one call, and what counts wrong elements after the first one."""
    rank, ranks = world.rank, world.size
    part = max(1, size // np.dtype(dtype).itemsize // ranks)
    whole = part * ranks

    def filled(of: int, elements: int, start: int = 0) -> Array:
        return pattern(of, ranks, elements, DTYPES[dtype], _CPU, start).numpy()

    def total() -> Array:
        return summed(ranks, whole, DTYPES[dtype], _CPU).numpy()

    received: Array
    if operation == "all-reduce":
        mine, received = filled(rank, whole), np.empty(whole, dtype)
        return lambda: world.Allreduce(mine, received), lambda: _wrong(received, total())
    if operation == "all-gather":
        mine, received = filled(rank, part), np.empty(whole, dtype)
        expected = np.concatenate([filled(of, part) for of in range(ranks)])
        return lambda: world.Allgather(mine, received), lambda: _wrong(received, expected)
    if operation == "reduce-scatter":
        mine, received = filled(rank, whole), np.empty(part, dtype)
        return (
            lambda: world.Reduce_scatter_block(mine, received),
            lambda: _wrong(received, total()[rank * part : (rank + 1) * part]),
        )
    if operation == "all-to-all":
        mine, received = filled(rank, whole), np.empty(whole, dtype)
        expected = np.concatenate([filled(of, part, rank * part) for of in range(ranks)])
        return lambda: world.Alltoall(mine, received), lambda: _wrong(received, expected)
    if operation == "broadcast":
        told = filled(rank, whole)
        return lambda: world.Bcast(told, 0), lambda: _wrong(told, filled(0, whole))
    mine, received = filled(rank, whole), np.empty(whole, dtype)
    to, of = (rank + 1) % ranks, (rank - 1) % ranks
    return lambda: world.Sendrecv(mine, to, 0, received, of), lambda: _wrong(received, filled(of, whole))


def _wrong(found: Array, expected: Array) -> int:
    return int((found != expected).sum())


def _world() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise InputError(
            f"--backend: found mpi, but mpi4py cannot be used here: {error}",
            hint="pip install mpi4py, with the site's MPI loaded (module load openmpi)",
            field="--backend",
            found="mpi",
            allowed="gloo, nccl",
        ) from None
    except RuntimeError as error:  # its wheel looks for the library of MPI when it is imported
        raise InputError(
            f"--backend: found mpi, but mpi4py finds no MPI library: {error}",
            hint="load the site's MPI (module load openmpi), or install Debian's openmpi-bin",
            field="--backend",
            found="mpi",
            allowed="gloo, nccl",
        ) from None
    started = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", "1")))
    if started > 1 and MPI.COMM_WORLD.size == 1:
        raise InputError(
            f"--backend: mpirun has started {started} processes, but mpi4py's MPI sees one: it is another MPI",
            hint=f"mpi4py uses {_version()}; start with the mpirun of that one",
            field="--backend",
            found=_version(),
        )
    return MPI.COMM_WORLD


def _version() -> str:
    from mpi4py import MPI

    return str(MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 "))
