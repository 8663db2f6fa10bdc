"""Cluster: where a recipe runs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from gradus.schema.errors import unknown_name
from gradus.schema.loading import dump_yaml, read_document, validated

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)


class GpuNumbers(BaseModel):
    """A GPU given by numbers instead of a catalogue name."""

    model_config = _STRICT

    name: str
    memory_gib: float = Field(gt=0)
    compute_capability: list[int] | None = None


class Links(BaseModel):
    """Catalogue names of the links inside a node and between nodes."""

    model_config = _STRICT

    intra: str | None = None
    inter: str | None = None


class Storage(BaseModel):
    """Folders that all nodes see, and that only one node sees."""

    model_config = _STRICT

    shared: str | None = None
    local: str | None = None


class Scheduler(BaseModel):
    model_config = _STRICT

    kind: Literal["local", "slurm"] = "local"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    time: str | None = None
    options: list[str] = []


class Environment(BaseModel):
    model_config = _STRICT

    modules: list[str] = []
    conda: str | None = None
    venv: str | None = None


class Container(BaseModel):
    model_config = _STRICT

    runtime: Literal["pyxis", "enroot", "apptainer", "charliecloud", "podman"]
    image: str
    mounts: list[str] = []


class Network(BaseModel):
    model_config = _STRICT

    interface: str | None = None


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
    calibration: dict[str, float] = {}

    @property
    def gpu_name(self) -> str | None:
        return self.gpu.name if isinstance(self.gpu, GpuNumbers) else self.gpu

    @classmethod
    def load(cls, name_or_path: str | Path, folder: str | Path = "clusters") -> Cluster:
        """A cluster from a path, or by its name in the folder of cluster files."""
        path = Path(name_or_path)
        if path.suffix not in (".yaml", ".yml") and not path.exists():
            known = {file.stem: file for file in sorted(Path(folder).glob("*.yaml"))}
            if str(name_or_path) not in known:
                raise unknown_name(
                    "cluster", str(name_or_path), known, field="--cluster", hint="give a path to a cluster.yaml"
                )
            path = known[str(name_or_path)]
        return validated(cls, read_document(path), str(path))

    @classmethod
    def detect(cls) -> Cluster:
        """The machine this runs on."""
        from gradus.hardware.cluster import detect_cluster  # the one way up: a noun that knows how to find itself

        return detect_cluster()

    def to_yaml(self) -> str:
        return dump_yaml(self.model_dump(exclude_defaults=True))
