"""Gathering: how processes that were started together agree on a run: through a folder beside the runs.

Every process says where it is; process 0 prepares the attempt and invites the others; each becomes a rank, says how
that ended, and leaves when process 0 has. All files appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradus.hardware.cluster import detect_cluster
from gradus.hardware.detect import detect_machine, usable_cores
from gradus.launcher.own_address import machine_identity, own_address
from gradus.launcher.together import Together
from gradus.launcher.torchrun import LOOPBACK, free_port
from gradus.record import strict_json
from gradus.record.node import node_name
from gradus.record.polling import Polling
from gradus.schema.cluster import Cluster
from gradus.schema.errors import GradusError, InputError

# Thousands of interpreters that start from one file system take a while.
_COME_SECONDS = 120.0
_SILENT_SECONDS = 60.0  # process 0 gives a sign every two
_SIGN_SECONDS = 2.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Member:
    """One of the processes, and what it was given of its node."""

    process: int
    node: str
    identity: str  # of the machine
    pid: int
    gpus: tuple[str, ...]  # by their unique names
    cores: tuple[int, ...]

    @classmethod
    def here(cls, process: int) -> Member:
        gpus = tuple(gpu.uuid for gpu in detect_machine().gpus)
        cores = tuple(sorted(os.sched_getaffinity(0)))
        return cls(process, node_name(), machine_identity(), os.getpid(), gpus, cores)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Member:
        return cls(**{**document, "gpus": tuple(document["gpus"]), "cores": tuple(document["cores"])})


@dataclass(frozen=True)
class Place:
    """A process as one or several ranks: the ranks of a node are neighbours, however the starter has dealt them out."""

    first_rank: int
    ranks: int  # that this process starts
    world_size: int
    local_rank: int  # of the first
    local_size: int
    node: int
    nodes: int
    own_gpu: bool  # it sees one GPU, which no other process does
    own_cores: bool


def places(members: Sequence[Member], each: int = 1) -> dict[int, Place]:
    """Who becomes which rank, by process."""
    nodes = list(dict.fromkeys(member.node for member in members))
    found, rank = {}, 0
    for number, node in enumerate(nodes):
        here = [member for member in members if member.node == node]
        for local, member in enumerate(here):
            others = [other for other in here if other is not member]
            own_gpu = bool(others) and len(member.gpus) == 1 and not any(set(member.gpus) & set(o.gpus) for o in others)
            own_cores = bool(others) and not any(set(member.cores) & set(o.cores) for o in others)
            found[member.process] = Place(
                *(rank, each, each * len(members), local * each, each * len(here), number, len(nodes)),
                own_gpu=own_gpu,
                own_cores=own_cores,
            )
            rank += each
    return found


@dataclass(frozen=True)
class Invitation:
    """What process 0 tells the others."""

    run: str
    attempt: int
    address: str
    port: int
    place: Place
    deadline: float | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class Left:
    """How a process's ranks ended."""

    process: int
    code: int
    said: Mapping[int, Sequence[str]]
    node: str


class Gathering:
    """Process 0's side. `members` are all there when it exists."""

    def __init__(self, together: Together, folder: Path, members: Sequence[Member]) -> None:
        self.together, self.folder, self.members = together, folder, members

    @property
    def nodes(self) -> int:
        return len({member.node for member in self.members})

    def ranks_each(self, nproc: int | None) -> int:
        """How many ranks a process starts: one, unless it is alone on its node and there are several GPUs for it."""
        alone_on_their_nodes = self.nodes == len(self.members)
        if alone_on_their_nodes:
            return nproc or max(1, len(self.members[0].gpus))
        here = sum(member.node == self.members[0].node for member in self.members)
        if nproc not in (None, here):
            raise InputError(
                f"--nproc: found {nproc}, but {self.together.started_by} has started {here} processes on this node, "
                "and each becomes a rank",
                hint="leave it out, or start one process on each node",
                field="--nproc",
                found=nproc,
                allowed=here,
            )
        return 1

    def ranks(self, nproc: int | None) -> int:
        return self.ranks_each(nproc) * len(self.members)

    def cluster(self, given: Cluster | None) -> Cluster:
        """What these processes have, as a cluster."""
        if given is not None:
            return given
        here = [member for member in self.members if member.node == self.members[0].node]
        gpus = len({gpu for member in here for gpu in member.gpus})
        machine = detect_cluster()
        cores = len({core for member in here for core in member.cores})
        update = {"nodes": self.nodes, "gpus_per_node": gpus, "cpu_cores": max(cores, usable_cores())}
        return machine.model_copy(update=update)

    def invite(
        self,
        run: Path,
        attempt: int,
        each: int = 1,
        *,
        at: tuple[str, int] | None = None,
        deadline: float | None = None,
        dry_run: bool = False,
    ) -> Invitation:
        """Tell each process which rank it is, and where all of them meet. The one of process 0 comes back."""
        address, port = at or (self._address(), free_port())
        invitations = {
            process: Invitation(str(run), attempt, address, port, place, deadline, dry_run)
            for process, place in places(self.members, each).items()
        }
        for process, invitation in invitations.items():
            _write(self.folder / f"invitation-{process}.json", asdict(invitation))
        return invitations[0]

    def _address(self) -> str:
        """Where process 0 can be found. Across machines never 127.x: each would look for it on itself."""
        if len({member.identity for member in self.members}) == 1:
            return LOOPBACK
        address, asked, problem = own_address()
        if address is None or address.startswith("127."):
            address = _slurm_address() or address
        if address is None or address.startswith("127."):
            raise InputError(
                f"{socket.gethostname()}: its {asked} stands for {address or 'no address'}, at which the processes on "
                f"other machines cannot find it{f' ({problem})' if problem else ''}",
                hint="export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME: the name of an interface, as `ip addr` has it",
                found=address or "no address",
            )
        return address

    def left(self) -> dict[int, Left]:
        """Those whose ranks have ended."""
        return {
            left.process: left for path in self.folder.glob("left-*.json") if (left := _read_left(path)) is not None
        }

    def end_all(self) -> None:
        """Ranks that are left are to be ended."""
        _write(self.folder / "end.json", {})


@contextlib.contextmanager
def gathered(together: Together, runs: Path) -> Iterator[Gathering]:
    """Process 0: wait for the others, and let them go at the end, however that came."""
    folder = _folder(together, runs)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        _write(folder / "member-0.json", asdict(Member.here(0)))
        count = 0

        def give_sign() -> None:
            nonlocal count
            count += 1
            with contextlib.suppress(OSError):
                _write(folder / "sign.json", {"count": count})

        give_sign()
        with Polling(give_sign, _SIGN_SECONDS):
            members = _wait_for_members(together, folder)
            yield Gathering(together, folder, members)
    finally:
        with contextlib.suppress(OSError):
            _write(folder / "over.json", {})
        time.sleep(2 * _LOOK_SECONDS)  # most have seen it then; to the others, a folder that is gone says the same
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # if there are no runs: bad input leaves nothing behind


class Guest:
    """The side of the other processes."""

    def __init__(self, together: Together, runs: Path) -> None:
        self.together, self.folder = together, _folder(together, runs)

    def invitation(self) -> Invitation | None:
        """Wait for process 0; None if it has ended without one, and has said why."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # process 0 may come later
        _write(self.folder / f"member-{self.together.process}.json", asdict(Member.here(self.together.process)))
        wanted, heard, silent_since = f"invitation-{self.together.process}.json", None, time.monotonic()
        while True:
            if (document := _read(self.folder / wanted)) is not None:
                return Invitation(**{**document, "place": Place(**document["place"])})
            if self.is_over:
                return None
            sign = _read(self.folder / "sign.json")
            if sign != heard:
                heard, silent_since = sign, time.monotonic()
            limit = _COME_SECONDS if heard is None else _SILENT_SECONDS
            if time.monotonic() - silent_since > limit:
                raise _unheard(self.together, self.folder, limit, heard is not None)
            time.sleep(_LOOK_SECONDS)

    @property
    def is_over(self) -> bool:
        return (self.folder / "over.json").exists() or not self.folder.is_dir()

    @property
    def is_to_end(self) -> bool:
        return (self.folder / "end.json").exists() or self.is_over

    def tell(self, code: int, said: Mapping[int, Sequence[str]]) -> None:
        with contextlib.suppress(OSError):  # over already
            left = Left(self.together.process, code, said, node_name())
            _write(self.folder / f"left-{self.together.process}.json", asdict(left))

    def wait_until_over(self, seconds: float) -> None:
        """Leave after process 0: a starter that sees a process leave badly would end all others at once."""
        heard, until = None, time.monotonic() + seconds
        while not self.is_over and time.monotonic() < until:
            sign = _read(self.folder / "sign.json")
            if sign != heard:
                heard, until = sign, time.monotonic() + seconds
            time.sleep(_LOOK_SECONDS)


def _wait_for_members(together: Together, folder: Path) -> list[Member]:
    until = time.monotonic() + _COME_SECONDS
    wanted = range(together.processes)
    found: dict[int, Member] = {}
    while True:
        for process in wanted:
            if process not in found and (document := _read(folder / f"member-{process}.json")) is not None:
                found[process] = Member.of(document)
        missing = [process for process in wanted if process not in found]
        if not missing:
            return [found[process] for process in wanted]
        if time.monotonic() > until:
            named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise InputError(
                f"{together.started_by} has started {together.processes} processes, of which {len(missing)} (number "
                f"{named}) have not been seen in {folder.parent} for {_COME_SECONDS:.0f} s",
                hint="all nodes must see one folder of runs: --runs /a/shared/folder",
                field="--runs",
                found=str(folder.parent),
            )
        time.sleep(_LOOK_SECONDS)


def _unheard(together: Together, folder: Path, seconds: float, was_heard: bool) -> GradusError:
    what = "gives no sign any more" if was_heard else "has not been seen"
    return InputError(
        f"process {together.process} of {together.processes} on {node_name()}: process 0 {what} in {folder.parent} "
        f"for {seconds:.0f} s",
        hint=None if was_heard else "all nodes must see one folder of runs: --runs /a/shared/folder",
        found=str(folder.parent),
    )


def _folder(together: Together, runs: Path) -> Path:
    return runs.absolute() / f".together-{together.key}"


def _slurm_address() -> str | None:
    name = os.environ.get("SLURMD_NODENAME")
    if name is None:
        return None
    from gradus.launcher.slurm.own_job import node_address

    return node_address(name)


def _write(path: Path, document: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    temporary.write_text(strict_json.encode(document))
    temporary.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:  # opened rather than looked for: a network file system may remember that it was absent
        return strict_json.decode(path.read_bytes())
    except (OSError, ValueError):
        return None


def _read_left(path: Path) -> Left | None:
    document = _read(path)
    if document is None:
        return None
    return Left(**{**document, "said": {int(rank): lines for rank, lines in document["said"].items()}})
