"""What a trace tells: the figures that an analysis ends in."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

SMALL_KERNEL_SECONDS = 10e-6  # about what it takes to launch one: the device waits for the host


@dataclass(frozen=True)
class SyncPoint:
    """A call with which the host waits for the device, or reads a value of it, by where the user's code makes it."""

    name: str  # as torch or CUDA call it: "aten::item", "cudaStreamSynchronize"
    count: int
    seconds: float  # in all analysed steps
    file: str | None = None  # of the user's code, where stacks were recorded
    line: int | None = None
    per_step: float = 0.0  # calls
    phase: str | None = None  # of the step: data, forward, backward, optimizer, ... as marked in the trace
    by_library: bool | None = None  # whether a library that this line called makes it; None: no stacks

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class KernelTotal:
    """All launches of one kernel; on a CPU, all calls of one operator, without what it called."""

    name: str
    kind: Literal["compute", "communication", "copy"]
    count: int
    seconds: float
    tensor_cores: bool | None = None  # None: no matrix product, or not to be told from its name

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Collective:
    """One kernel or call in which ranks talk, in the order in which the rank took part."""

    name: str
    began: float  # seconds, on the trace's own clock
    seconds: float
    step: int  # counted from 0 within the analysed steps
    bytes: int | None = None  # where the trace says it
    group: str | None = None  # of ranks, by torch's name of the process group


@dataclass(frozen=True)
class TraceAnalysis:
    """Of one rank's trace. Seconds are in all analysed steps together; `per_step` divides."""

    path: str
    rank: int | None
    device: str  # "cuda" or "cpu"
    steps: int
    span_seconds: float  # of the analysed steps
    busy_seconds: float  # union of what ran on the device
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float
    overlap: float | None  # the share of communication that was hidden; None where there was none
    copy_seconds: float
    idle_seconds: float  # and its parts, which sum to it
    launch_starved_seconds: float
    data_wait_seconds: float
    sync_blocked_seconds: float
    idle_other_seconds: float
    kernels: int
    small_kernels: int  # below SMALL_KERNEL_SECONDS
    small_kernel_share: float  # of busy time
    matmul_seconds: float
    tensor_core_seconds: float | None
    matmul_off_tensor_cores_seconds: float | None
    syncs: tuple[SyncPoint, ...]
    top_kernels: tuple[KernelTotal, ...]
    collectives: tuple[Collective, ...]
    phase_seconds: dict[str, float]  # of the marks gradus:data, gradus:forward, ... on the host
    world_size: int | None
    device_name: str | None
    median_gap_seconds: float | None  # between kernels
    truncated: bool  # the file ended early; what was readable was used
    not_measured: tuple[str, ...]

    def per_step(self, seconds: float) -> float:
        return seconds / self.steps if self.steps else seconds

    def document(self) -> dict[str, Any]:
        """As `--json` prints it; single collectives are left out, there may be many thousands."""
        found = asdict(self)
        found["collectives"] = len(self.collectives)
        return found


@dataclass(frozen=True)
class Skew:
    """Time in collectives over several ranks: waiting for the slowest rank to arrive, and transfer.

    A rank is in a collective from its arrival on. The last one to arrive waits for nobody: the shortest duration among
    the ranks is the transfer, what others have above it was waiting.
    """

    ranks: tuple[int, ...]
    collectives: int  # that all ranks have
    transfer_seconds: float  # a rank, all steps
    waiting_seconds: dict[int, float]  # by rank, all steps
    slowest: int | None  # the rank that others waited for most: the one that waited least
    slowest_share: float  # of the collectives, in which it was the last to arrive
    steps: int

    def document(self) -> dict[str, Any]:
        found = asdict(self)
        found["waiting_seconds"] = {str(rank): seconds for rank, seconds in self.waiting_seconds.items()}
        return found
