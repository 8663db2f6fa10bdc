"""A single rank: started by a process of its own, without torchrun, where srun or mpirun has started one for each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import BinaryIO

from gradus.faults.children import kill_descendants
from gradus.faults.parent import end_with_parent
from gradus.faults.stop_signals import ignore_stop_signals
from gradus.hardware.detect import usable_cores
from gradus.launcher.attempt import Launch
from gradus.launcher.device_sampler import DeviceSampler, gpus_used_by
from gradus.launcher.gathering import Place
from gradus.launcher.node_ranks import RANK_MODULE, variables_of
from gradus.launcher.processes import attempt_processes, marks
from gradus.launcher.rank_output import STREAMS, RankOutput
from gradus.launcher.torchrun import rank_environment
from gradus.record.node import node_name
from gradus.record.variables import BIND, DRY_RUN, GPU, OWN, PARENT_RANKS


class SingleRank:
    """One rank and what it prints, in the log of its node."""

    def __init__(self, launch: Launch, place: Place, address: str, port: int, log: BinaryIO) -> None:
        self.rank, self._place, self._log = place.first_rank, place, log
        folder = launch.log_path.parent / f"rank-{self.rank}"
        files = folder / "single" / "attempt_0" / "0"  # where the reader of torchrun's files looks
        files.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            out, err = (opened.enter_context((files / f"{stream}.log").open("wb")) for stream in STREAMS)
            self.process = subprocess.Popen(
                _command(launch),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=_variables(launch, place, address, port),
                cwd=launch.script.directory if launch.script else None,
                start_new_session=True,
                preexec_fn=_before_it_starts,
            )
        self.output = RankOutput(folder, 1, log, self.rank)
        # One of the processes on a node looks after all of its ranks, and after all GPUs that it can see.
        all_here = partial(attempt_processes, launch.run.path, launch.attempt, os.environ.get("SLURMD_NODENAME"))
        self._devices: DeviceSampler | None = None
        if place.local_rank == 0 or place.own_gpu:
            gpus, number = gpus_used_by(place.local_size, launch.recipe), place.local_rank
            self._devices = DeviceSampler(launch.run, launch.attempt, gpus, all_here, beside=number)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def processes(self) -> dict[int, int]:
        """Rank -> process id, as long as it is alive."""
        return {self.rank: self.process.pid} if self.running else {}

    def end(self) -> None:
        kill_descendants(self.process.pid)
        self.process.kill()
        self.process.wait()

    def close(self) -> int:
        """The rank's exit code; a rank that ended badly has a few lines in the log, as torchrun would write them."""
        if self.running:
            self.end()
        if self._devices is not None:
            self._devices.close()
        self.output.close()
        code = self.process.returncode
        if code:
            self._log.write(failure_table(self.rank, self._place.local_rank, self.process.pid, code).encode())
            self._log.flush()
        return code

    def last_words(self) -> list[str]:
        return self.output.last_words(self.rank)


def failure_table(rank: int, local_rank: int, pid: int, code: int) -> str:
    """What launcher.torchrun.deaths_in_log reads."""
    entries = {
        "time": f"{datetime.now():%Y-%m-%d_%H:%M:%S}",
        "host": node_name(),
        "rank": f"{rank} (local_rank: {local_rank})",
        "exitcode": f"{code} (pid: {pid})",
    }
    lines = [f"  {name:<9} : {value}" for name, value in entries.items()]
    return "\n".join(["Root Cause (first observed failure):", "[0]:", *lines]) + "\n"


def _command(launch: Launch) -> Sequence[str]:
    if launch.script is None:
        return [sys.executable, "-m", RANK_MODULE, str(launch.run.path), str(launch.attempt)]
    return [sys.executable, "-m", "gradus.launcher.script_rank", *launch.script.command]


def _variables(launch: Launch, place: Place, address: str, port: int) -> dict[str, str]:
    """torchrun's own variables, and ours."""
    sharing = 1 if place.own_cores else place.local_size
    variables = rank_environment(sharing, usable_cores(), launch.recipe)
    for name in (DRY_RUN, "TORCHELASTIC_USE_AGENT_STORE"):
        variables.pop(name, None)
    # A script takes the GPU with the number LOCAL_RANK; of a process that sees one alone, that is number 0.
    local = (0, 1) if place.own_gpu and launch.script else (place.local_rank, place.local_size)
    return {
        **variables,
        **marks(launch.run.path, launch.attempt),
        **variables_of(launch),
        "RANK": str(place.first_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(local[0]),
        "LOCAL_WORLD_SIZE": str(local[1]),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_RANK": str(place.first_rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        PARENT_RANKS: "1",
        BIND: OWN if place.own_cores or place.local_size == 1 else "1",
        **({GPU: OWN} if place.own_gpu else {}),
    }


def _before_it_starts() -> None:
    end_with_parent(signal.SIGKILL)
    ignore_stop_signals()
