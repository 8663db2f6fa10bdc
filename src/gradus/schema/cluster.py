"""Cluster: where a recipe runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gradus.schema.calibration import Calibration
from gradus.schema.errors import unknown_name
from gradus.schema.loading import dump_yaml, read_document, validated
from gradus.schema.saving import write_document
from gradus.schema.scheduler import Scheduler
from gradus.schema.software import Container, Environment

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
Positive = Annotated[float, Field(gt=0)]
PeakType = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8"]


class GpuNumbers(BaseModel):
    """A GPU given by numbers. Those left out are the catalogue's, where it knows the name."""

    model_config = _STRICT

    name: str
    memory_gib: Positive
    compute_capability: list[int] | None = Field(None, min_length=2, max_length=2)
    peak_tflops: dict[PeakType, Positive] = {}  # dense: without sparsity
    memory_bandwidth_gb_per_second: Positive | None = None
    power_watts: Positive | None = None
    multiprocessors: int | None = Field(None, ge=1)  # streaming multiprocessors or compute units


class LinkNumbers(BaseModel):
    """A link given by numbers: in one direction, of a GPU inside a node or of a port between nodes."""

    model_config = _STRICT

    name: str
    gb_per_second: Positive
    latency_us: float | None = Field(None, ge=0)


class Links(BaseModel):
    """The links inside a node and between nodes, each a catalogue name or numbers."""

    model_config = _STRICT

    intra: str | LinkNumbers | None = None
    inter: str | LinkNumbers | None = None
    nics_per_node: int = Field(1, ge=1)  # ports of the `inter` kind, which a node's GPUs share


class Storage(BaseModel):
    """Folders that all nodes see, and that only one node sees."""

    model_config = _STRICT

    shared: str | None = None
    local: str | None = None
    gb_per_second: float | None = Field(None, gt=0)  # that one node writes to the shared folder


class Network(BaseModel):
    """What the libraries that move tensors between nodes are told. Nothing here: they choose."""

    model_config = _STRICT

    interface: str | None = Field(None, pattern=r"^[\w.:,=^-]+$")
    variables: dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], str] = {}  # such as NCCL_IB_HCA


class Cluster(BaseModel):
    """Nodes, GPUs, links, storage, scheduler and software environment of a machine."""

    model_config = _STRICT

    name: str
    nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(0, ge=0)
    gpu: str | GpuNumbers | None = None
    cpu_cores: int = Field(ge=1)
    memory_gib: float = Field(gt=0)
    links: Links = Links()
    storage: Storage = Storage()
    scheduler: Scheduler = Scheduler()
    environment: Environment = Environment()
    container: Container | None = None
    network: Network = Network()
    failures_per_node_day: float | None = Field(None, ge=0)
    price_per_gpu_hour: float | None = Field(None, ge=0)
    calibration: Calibration = Calibration()

    @property
    def gpu_name(self) -> str | None:
        return self.gpu.name if isinstance(self.gpu, GpuNumbers) else self.gpu

    @classmethod
    def load(cls, name_or_path: str | Path, folder: str | Path = "clusters") -> Cluster:
        """A cluster from a path, or by its name: in the folder of cluster files, or one that gradus brings along."""
        from gradus.hardware.cluster import check_names, shipped_clusters  # the catalogues live up there

        path = Path(name_or_path)
        if path.suffix not in (".yaml", ".yml") and not path.exists():
            # An own file of that name wins: it may be a calibrated copy.
            known = {**shipped_clusters(), **{file.stem: file for file in sorted(Path(folder).glob("*.yaml"))}}
            if str(name_or_path) not in known:
                raise unknown_name(
                    "cluster", str(name_or_path), known, field="--cluster", hint="give a path to a cluster.yaml"
                )
            path = known[str(name_or_path)]
        cluster = validated(cls, read_document(path), str(path))
        check_names(cluster, str(path))
        return cluster

    @classmethod
    def detect(cls) -> Cluster:
        """What there is here: where Slurm answers, its nodes; inside of a job or without Slurm, this machine."""
        from gradus.hardware.cluster import detect_here  # the one way up: a noun that knows how to find itself

        return detect_here()

    def to_yaml(self) -> str:
        return dump_yaml(self.model_dump(exclude_defaults=True))

    def save(self, path: str | Path) -> None:
        """Write the cluster to a file, or into one: what is as before keeps its lines and comments."""
        path = Path(path)
        before = validated(type(self), read_document(path), str(path)) if path.exists() else None
        same = [name for name in type(self).model_fields if before and getattr(before, name) == getattr(self, name)]
        write_document(path, self.model_dump(exclude_defaults=True), keep=same)
