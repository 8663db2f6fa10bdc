"""The parent of a lab's daemons, so that nothing outlives whoever opened the lab.

`supervisor.py FOLDER OWNER` takes one request a line on its standard input (a JSON object) and answers each with one
line. It ends when its input closes or its owner is gone, however that came about: it kills all that was ever started
below it, and removes the folder. It adopts orphans, which makes "below it" exact: a job step that detached itself
has the supervisor as its parent again.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from isolation import Freezer, LoopbackAddress, adopt_orphans, die_with_parent

MARK = "GRADUS_LAB_NODE"  # in the environment of a node's slurmd, and so of its slurmstepds
LOOK_EVERY_SECONDS = 0.5  # at whether the owner still lives: its pipe may be held open by a fork of it
CLIENTS = {"srun", "salloc", "sbatch", "squeue", "scontrol", "sinfo", "scancel", "sattach", "sacct"}


class Supervisor:
    def __init__(self, folder: Path, owner: int) -> None:
        self.folder, self.owner = folder, owner
        self.pids: dict[str, int] = {}
        self.codes: dict[int, int] = {}
        self._running: list[subprocess.Popen[bytes]] = []
        self._address = LoopbackAddress()
        self._freezer: Freezer | None = None

    def serve(self) -> None:
        waiting = b""
        while os.getppid() == self.owner:
            ready, _, _ = select.select([0], [], [], LOOK_EVERY_SECONDS)
            if not ready:
                continue
            read = os.read(0, 65536)
            if not read:
                return
            waiting += read
            while b"\n" in waiting:
                line, waiting = waiting.split(b"\n", 1)
                try:
                    answer = self._answer(json.loads(line))
                except OSError as error:
                    answer = {"error": error.strerror}
                os.write(1, json.dumps(answer).encode() + b"\n")

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request["name"]
        if request["do"] == "freezer":
            self._freezer = Freezer(self.folder)
            return {}
        if request["do"] == "start":
            return {"pid": self._start(name, request["command"], request["environment"])}
        if request["do"] == "kill":
            return {"killed": self._kill(name)}
        return {"code": self.codes.get(self.pids[name])}  # None while it lives

    def _start(self, name: str, command: list[str], environment: dict[str, str]) -> int:
        with (self.folder / "log" / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(
                command,
                env={**environment, MARK: name},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=die_with_parent,  # should the supervisor itself be killed
            )
        self._running.append(process)
        if os.path.exists(f"/proc/{process.pid}"):  # else it has ended already, and the code is its own
            self.codes.pop(process.pid, None)  # of an earlier process with the same number
        self.pids[name] = process.pid
        return process.pid

    def _kill(self, name: str) -> int:
        """SIGKILL to a daemon and all that runs on its node: what a power cut does to it.

        All are stopped first, so that none lives to tell Slurm that another has died.
        """
        stopped: set[int] = set()
        while more := members_of(name) - stopped:
            _signal_all(more, signal.SIGSTOP)
            stopped |= more
        killed = 0
        while members := members_of(name):
            killed += _kill_all(members)
            self.reap()
        return killed

    def reap(self, *_: object) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.codes[pid] = os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        while left := descendants_of({os.getpid()}) | self._clients():
            _kill_all(left)
            self.reap()
        try:
            self._address.remove()
            if self._freezer:
                self._freezer.remove()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _clients(self) -> set[int]:
        """Slurm's commands that somebody else started to talk to this lab: they would wait for it for ever."""
        told = f"SLURM_CONF={self.folder}/etc/slurm.conf".encode()
        return {pid for pid in living() if _name(pid) in CLIENTS and told in _environment(pid)} - {self.owner}


def _signal_all(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _kill_all(pids: set[int]) -> int:
    _signal_all(pids, signal.SIGKILL)
    time.sleep(0.01)  # for the kernel to end them: what is still there is killed once more
    return len(pids)


def living() -> dict[int, int]:
    """The parent of each process that has not ended."""
    parents = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            state, parent = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state not in (b"Z", b"X"):
            parents[int(entry)] = int(parent)
    return parents


def descendants_of(roots: set[int]) -> set[int]:
    parents = living()
    found: set[int] = set()
    for pid in parents:
        line = []
        while pid not in roots and pid not in found and pid in parents:
            line.append(pid)
            pid = parents[pid]
        if pid in roots or pid in found:
            found.update(line)
    return found - roots


def members_of(node: str) -> set[int]:
    """A node's slurmd, the steps that it started, and all below these: those of this supervisor only."""
    marks = {f"{MARK}={node}".encode(), f"SLURMD_NODENAME={node}".encode()}
    roots = {pid for pid in descendants_of({os.getpid()}) if marks.intersection(_environment(pid))}
    return roots | descendants_of(roots)


def _environment(pid: int) -> list[bytes]:
    """The variables that a process was started with."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # it has ended


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def main() -> None:
    adopt_orphans()
    supervisor = Supervisor(Path(sys.argv[1]), int(sys.argv[2]))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    signal.signal(signal.SIGCHLD, supervisor.reap)
    try:
        supervisor.serve()
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        supervisor.end()


if __name__ == "__main__":
    main()
