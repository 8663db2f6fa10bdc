"""A node's task in a preflight: it looks at its own node, meets the others, and tries every way between them.

The first node's task is the hub: it collects what all of them say, judges, prints and writes the report.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.faults.parent import end_with_parent
from gradus.launcher.preflight.facts import NodeFacts, node_facts
from gradus.launcher.preflight.hub import Hub, Member
from gradus.launcher.preflight.judging import judged
from gradus.launcher.preflight.nccl_log import read_nccl_log
from gradus.launcher.preflight.report import Preflight
from gradus.launcher.torchrun import free_port
from gradus.schema.cluster import Cluster

LIMIT_SECONDS = 55.0  # under a minute, with the start of the tasks
_JOIN_SECONDS = 20.0
_SHARED_SECONDS = 10.0  # NFS remembers for some seconds that a file was absent
_CONNECT_SECONDS = 3.0
_REPORT_SECONDS = 3.0  # kept for the end
_RANK_MODULE = "gradus.bench.preflight_rank"
_MARK = "gradus-preflight"


@dataclass(frozen=True)
class Task:
    """One node's part of a preflight."""

    index: int
    names: tuple[str, ...]  # of all nodes, in order
    hub: tuple[str, ...]  # addresses at which the first node may be found
    port: int
    key: str  # the same on all, and on no other preflight
    folder: Path  # that all nodes should see
    cluster: Cluster | None = None
    limit_seconds: float = LIMIT_SECONDS


def run_task(task: Task) -> Preflight | None:
    """Do this node's part. The first node returns what was found out."""
    until = time.monotonic() + task.limit_seconds
    hub = Hub(len(task.names), task.key, task.port, until) if task.index == 0 else None
    try:
        began = time.monotonic()
        member = None
        report: dict[str, Any] = {}
        try:
            addresses = ("127.0.0.1",) if hub else task.hub
            port = hub.port if hub else task.port
            member = Member.connected(addresses, port, task.index, task.key, min(until, began + _JOIN_SECONDS))
            report = _looked_around(task, member, until - _REPORT_SECONDS)
            member.report(report)
        except OSError as error:
            if hub is None:  # the only line of a node that cannot find the first one: srun carries it there
                print(f"{task.names[task.index]}: cannot talk to the first node: {error}", flush=True)
                return None
            raise
        finally:
            if member and not hub:
                member.close()
        if hub is None:
            return None
        hub.wait_for_reports(until)
        return judged(task.names, hub.reports, task.cluster, time.monotonic() - began)
    finally:
        if hub:
            hub.close()


def _looked_around(task: Task, member: Member, until: float) -> dict[str, Any]:
    cluster = task.cluster
    local = cluster.storage.local if cluster else None
    facts = node_facts(task.folder, local, cluster.network.interface if cluster else None)
    with _Listener(task.key) as listener:
        place = {"node": facts.node, "address": facts.address, "port": listener.port, "identity": facts.identity}
        meeting = {"meeting": _meeting(facts)} if task.index == 0 else {}
        members = member.join({**place, **meeting}, _left(until, _JOIN_SECONDS))
        clock = member.clock()
        unreachable = _unreachable(members, task.index, task.key)
        member.barrier("reached", _left(until, _JOIN_SECONDS))
    shared = _shared(task, member, members, until)
    report = {
        "facts": facts.document(),
        "clock": {"offset_seconds": -clock.offset_seconds, "uncertainty_seconds": clock.uncertainty_seconds},
        "unreachable": unreachable,
        "shared": shared,
    }
    # Ranks would only wait for one that is not there, or that they cannot connect to.
    if member.agreed("ranks", len(members) == len(task.names) and not unreachable, _left(until, _SHARED_SECONDS)):
        report |= _ranks(task, facts, members, until)
    return report


def _left(until: float, at_most: float) -> float:
    return max(0.5, min(at_most, until - time.monotonic()))


class _Listener:
    """Answers whoever connects with this node's key, so that a connection to a stranger does not count."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._server = socket.create_server(("", 0), backlog=512)
        self.port = int(self._server.getsockname()[1])

    def __enter__(self) -> _Listener:
        threading.Thread(target=self._answer, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.close()

    def _answer(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(self._key)


def _unreachable(members: Sequence[Mapping[str, Any]], index: int, key: str) -> dict[str, str]:
    """The nodes that this one cannot connect to where they say that they are, each with the reason."""
    found = {}
    # Everybody begins with another one, so that they do not all knock at the same door.
    for at in range(len(members)):
        other = members[(index + at) % len(members)]
        if other["index"] == index:
            continue
        if other["address"] is None:
            found[other["node"]] = "it knows no address of its own"
            continue
        try:
            where = (other["address"], other["port"])
            with socket.create_connection(where, timeout=_CONNECT_SECONDS) as connection:
                connection.settimeout(_CONNECT_SECONDS)
                if connection.recv(1024) != key.encode():
                    found[other["node"]] = f"somebody else answers at {other['address']}"
        except OSError as error:
            found[other["node"]] = f"{other['address']}: {error.strerror or error}"
    return found


def _shared(task: Task, member: Member, members: Sequence[Mapping[str, Any]], until: float) -> dict[str, Any]:
    """Whether this node can write to the shared folder, and sees there what the others have written, and when."""
    own = task.folder / f"{_MARK}-{task.key}-{task.index}"
    result: dict[str, Any] = {"path": str(task.folder), "problem": None}
    began = time.monotonic()
    try:
        with own.open("w") as file:
            file.write(task.key)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        result["problem"] = f"{error.strerror}"
    result["write_seconds"] = time.monotonic() - began
    try:
        late = set(member.barrier("written", _left(until, _SHARED_SECONDS)))
        began = time.monotonic()
        missing = {other["index"] for other in members} - late - {task.index}
        end = began + _left(until, _SHARED_SECONDS)
        while True:
            missing = {index for index in missing if not _holds(task, index)}
            if not missing or time.monotonic() > end:
                break
            time.sleep(0.05)
        result["seen_seconds"] = time.monotonic() - began
        result["unseen"] = [task.names[index] for index in sorted(missing)]
        member.barrier("seen", _left(until, _SHARED_SECONDS + 1))
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
    return result


def _holds(task: Task, index: int) -> bool:
    # Opened, and not looked for in the folder's list, which a network file system may remember from before.
    try:
        return (task.folder / f"{_MARK}-{task.key}-{index}").read_text() == task.key
    except OSError:
        return False


def _meeting(facts: NodeFacts) -> dict[str, Any]:
    """Where ranks meet: at the first node, as the other nodes know it."""
    return {"address": facts.address or "127.0.0.1", "port": free_port()}


def _ranks(task: Task, facts: NodeFacts, members: Sequence[Mapping[str, Any]], until: float) -> dict[str, Any]:
    """Start this node's ranks, one for each GPU, or one where there is none, and collect what they measured."""
    meeting = next(other["meeting"] for other in members if other["index"] == 0)
    shares_a_host = len({other["identity"] for other in members}) < len(members)
    here = max(1, facts.gpus)
    if here * len(task.names) == 1:
        return {}  # nobody to talk to
    with tempfile.TemporaryDirectory(prefix="gradus-preflight-") as folder:
        variables = {
            **os.environ,
            **_network_variables(task.cluster),
            "MASTER_ADDR": meeting["address"],
            "MASTER_PORT": str(meeting["port"]),
            "LOCAL_WORLD_SIZE": str(here),
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_FILE": f"{folder}/nccl.%p.log",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # a collective that hangs is reported, and does not end the rank
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        seconds = _left(until, 600.0)
        processes = []
        for local_rank in range(here):
            arguments = {
                "node": task.index,
                "nodes": len(task.names),
                "local_rank": local_rank,
                "ranks_here": here,
                "seconds": seconds,
                "shares_a_host": shares_a_host,
            }
            # Files, and not pipes: what a rank said before it hung is read as well.
            with open(f"{folder}/{local_rank}.out", "wb") as out, open(f"{folder}/{local_rank}.err", "wb") as err:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", _RANK_MODULE, json.dumps(arguments)],
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        env=variables,
                        preexec_fn=lambda: end_with_parent(signal.SIGKILL),
                    )
                )
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
        hung = [process.poll() is None for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        logs = "\n".join(path.read_text(errors="replace") for path in Path(folder).glob("nccl.*.log"))
        transport = read_nccl_log(logs)
        return {
            "ranks": [
                _rank_report(Path(folder), local_rank, process.returncode, hung[local_rank])
                for local_rank, process in enumerate(processes)
            ],
            "nccl": {
                "network": transport.network,
                "devices": list(transport.devices),
                "channels": dict(transport.channels),
                "reasons": list(transport.reasons),
                "over_sockets": transport.over_sockets,
            }
            if logs
            else None,
        }


def _rank_report(folder: Path, local_rank: int, code: int, hung: bool) -> dict[str, Any]:
    """What a rank said, line by line: later lines add to earlier ones. And how it ended, if that was not well."""
    report: dict[str, Any] = {"local_rank": local_rank, "stage": "started", "pairs": [], "rows": []}
    for line in (folder / f"{local_rank}.out").read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            for key, value in said.items():
                report[key] = [*report[key], *value] if key in ("pairs", "rows") else value
    if hung:
        report |= {"hung": True, "problem": f"no answer in time while it was at: {report['stage']}"}
    elif code:
        words = (folder / f"{local_rank}.err").read_text(errors="replace").strip().splitlines()
        report["problem"] = f"left with {code} while it was at: {report['stage']}: {words[-1] if words else 'no words'}"
    return report


def _network_variables(cluster: Cluster | None) -> dict[str, str]:
    from gradus.launcher.slurm.script import network_variables

    return dict(network_variables(cluster.network)) if cluster else {}


def alone(folder: Path, cluster: Cluster | None, limit_seconds: float = LIMIT_SECONDS) -> Preflight:
    """A preflight of this machine by itself."""
    task = Task(0, (socket.gethostname(),), ("127.0.0.1",), 0, secrets.token_hex(8), folder, cluster, limit_seconds)
    found = run_task(task)
    assert found is not None, "the first node judges"
    return found
