"""Device sampler: one thread on each node that writes down every few seconds what its GPUs and its host are at.

It runs in the process that launched the ranks, not in one of them. Whatever fails in it, the run goes on without it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from gradus.faults.children import descendants
from gradus.hardware.gpu_counters import GpuCounters
from gradus.hardware.host_counters import HostCounters
from gradus.record.device_log import DeviceLog
from gradus.record.directory import RunDirectory
from gradus.record.node import node_name
from gradus.record.problem import OnProblem, report_on_stderr
from gradus.schema.device_sample import DeviceSample, HostSample
from gradus.schema.recipe import Recipe

EVERY_SECONDS = 2.0
_CLOSE_SECONDS = 5.0  # a driver that hangs must not keep a run from ending


class DeviceSampler:
    """A first sample at once, the last one at the end."""

    def __init__(
        self,
        run: RunDirectory,
        attempt: int,
        gpus: int,
        processes: Callable[[], Iterable[int]],
        *,
        beside: int = 0,
        every_seconds: float = EVERY_SECONDS,
        on_problem: OnProblem = report_on_stderr,
        nvml: Any = None,
    ) -> None:
        """`gpus` are those that the ranks of this node train on, `processes` the ranks and all that they have started.

        Where each process of a node sees its own GPU only, each has a sampler: the one `beside` number 0 leaves the
        host to that.
        """
        self._run, self._attempt, self._gpus, self._processes = run, attempt, gpus, processes
        self._beside = beside
        self._every_seconds, self._on_problem, self._nvml = every_seconds, on_problem, nvml
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._go, name="gradus-devices", daemon=True)
        self._thread.start()

    def __enter__(self) -> DeviceSampler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._done.set()
        self._thread.join(_CLOSE_SECONDS)

    def _go(self) -> None:
        try:
            name = f"{node_name()}-{self._beside}" if self._beside else node_name()
            log = DeviceLog(self._run, name, self._on_problem)
            gpus, host = GpuCounters.open(gpus_of_job(self._gpus), self._nvml), HostCounters()
            while True:
                ended = self._done.is_set()
                log.write(
                    DeviceSample(
                        time=time.time(),
                        attempt=self._attempt,
                        node=node_name(),
                        gpus=gpus.read() if gpus is not None else None,
                        host=host.read(self._processes()) if not self._beside else HostSample(),
                    )
                )
                if ended:
                    break
                self._done.wait(self._every_seconds)
            if gpus is not None:
                gpus.close()
            for problem in log.close():
                self._on_problem(problem)
        except Exception as error:  # drivers, bindings and /proc fail in their own ways; none of them is worth a run
            self._on_problem(f"devices are no longer written down: {type(error).__name__}: {error}")


def with_descendants(pid: int) -> list[int]:
    return [pid, *descendants(pid)]


def gpus_used_by(ranks: int, recipe: Recipe | None) -> int:
    """A script's ranks have a GPU each; those of a recipe may share them."""
    return ranks if recipe is None else -(-ranks // recipe.plan.ranks_per_gpu)


def gpus_of_job(used: int) -> int | None:
    """How many of the visible GPUs are the job's: all if somebody has chosen them, else those that its ranks use."""
    chosen = any(name in os.environ for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS"))
    return None if chosen else used
