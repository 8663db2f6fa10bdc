"""Device sample: what the GPUs and the host of a node were at for a moment, a line of `devices/<node>.jsonl`.

What a driver or a system does not say is None, never 0.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

_READ = ConfigDict(extra="ignore", frozen=True)


class GpuSample(BaseModel):
    """One GPU of those that belong to the job."""

    model_config = _READ

    index: int  # as the driver counts, whichever are visible
    uuid: str | None = None
    name: str | None = None
    utilisation: float | None = None  # 0 to 1: of the time, in which any kernel ran
    memory_used_bytes: int | None = None  # by everybody
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    clock_mhz: int | None = None  # of its multiprocessors
    clock_max_mhz: int | None = None
    throttle: tuple[str, ...] | None = None  # why its clock is held down; empty if it is not
    energy_joules: float | None = None  # the driver's counter, which starts anew when the driver is loaded
    processes: int | None = None  # that compute on it, of anybody


class HostSample(BaseModel):
    model_config = _READ

    cpu_utilisation: float | None = None  # 0 to 1, of the cores this job may use, since the sample before
    cores: int | None = None  # that this job may use
    load_1min: float | None = None
    memory_used_bytes: int | None = None  # of the job's limit where it has one, else of the machine
    memory_total_bytes: int | None = None
    ranks_cpu_seconds: float | None = None  # of the ranks and what they started, so far
    read_bytes: int | None = None  # from storage by them, so far
    write_bytes: int | None = None


class DeviceSample(BaseModel):
    model_config = _READ

    time: float  # unix time
    attempt: int
    node: str
    gpus: tuple[GpuSample, ...] | None = None  # None where there is no NVIDIA driver to ask
    host: HostSample = HostSample()
