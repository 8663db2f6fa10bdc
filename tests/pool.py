"""A pool of processes that form worlds of any size, again and again, over gloo."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from gradus.parallel import world as worlds
from gradus.parallel.world import connected

MANY_THREADS = 60
DEADLINE = 300.0  # seconds for one job; the longest takes about 30 on two busy cores


class Pool:
    def __init__(self) -> None:
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def _grow(self, ranks: int) -> None:
        """As many processes as the largest world so far has needed."""
        context = multiprocessing.get_context("spawn")
        while len(self._processes) < ranks:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,))  # not a daemon: those may not have loader workers
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(world, *arguments)` on each of `ranks` processes; the results by rank."""
        if not all(process.is_alive() for process in self._processes):  # a job has taken one along
            self._replace()
        self._grow(ranks)
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(ranks):
                self._pipes[rank].send((rank, ranks, str(Path(folder) / "store"), function, arguments))
            answers = self._answers(ranks, time.monotonic() + DEADLINE)
        failures = [text for ok, text in answers if not ok]
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def _replace(self) -> None:
        for process in self._processes:
            process.kill()
        self._pipes, self._processes = [], []

    def _answers(self, ranks: int, deadline: float) -> list[Any]:
        """What each rank says. One that says nothing in time shows on stderr where it is, and all are replaced."""
        late = [rank for rank in range(ranks) if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic()))]
        if not late:
            return [pipe.recv() for pipe in self._pipes[:ranks]]
        for process in self._processes[:ranks]:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)  # for faulthandler to write
        self._replace()
        raise AssertionError(f"rank {late} of {ranks} did not answer within {DEADLINE:g} s; stacks are on stderr")


def _serve(pipe: Any) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    while (job := _next_job(pipe)) is not None:
        rank, ranks, store_file, function, arguments = job
        try:
            store = dist.FileStore(store_file, ranks)
            with connected(rank, rank, ranks, torch.device("cpu"), store) as world:
                world.barrier()  # else one rank may leave while another still connects
                answer = ForkingPickler.dumps((True, function(world, *arguments)))
        except BaseException:
            answer = ForkingPickler.dumps((False, f"rank {rank} of {ranks}:\n{traceback.format_exc()}"))
        _close_watches()
        _forget_meshes()
        gc.collect()  # no model of this job may outlive the backends (see there)
        worlds.left_backends.clear()
        pipe.send_bytes(answer)  # last: the session removes the folder of the store, which a watch would write to again


def _close_watches() -> None:
    """Of runs that failed, or were left as they were: their threads would hold models, and these their worlds."""
    for thread in threading.enumerate():
        if thread.name == "gradus-watch" and (target := getattr(thread, "_target", None)) is not None:
            target.__self__.close()


def _forget_meshes() -> None:
    """torch remembers how it has divided tensors over a mesh, and with that the groups of meshes long gone. Each has
    threads of gloo that look around 100 times a second: after many jobs they took a tenth of a core in each process.
    """
    if len(os.listdir("/proc/self/task")) < MANY_THREADS:
        return
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()


def _next_job(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the test session is gone
        return None
    except Exception:  # a job that cannot be unpickled here: say so instead of leaving the session to wait
        return (-1, 0, "", _raise, (traceback.format_exc(),))


def _raise(world: object, text: str) -> None:
    raise RuntimeError(text)
