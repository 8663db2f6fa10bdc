"""Plan: how a recipe is cut up over the ranks of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from gradus.schema.errors import InputError
from gradus.schema.intervals import Interval
from gradus.schema.loading import dump_yaml, read_document, validated

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp64"]


class Mesh(BaseModel):
    """How many ways each dimension is split, outermost first. `expert` reuses the ranks of shard × context."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    replicate: int = Field(1, ge=1)
    pipeline: int = Field(1, ge=1)
    shard: int = Field(1, ge=1)
    context: int = Field(1, ge=1)
    tensor: int = Field(1, ge=1)
    expert: int = Field(1, ge=1)

    @property
    def world_size(self) -> int:
        return self.replicate * self.pipeline * self.shard * self.context * self.tensor

    @property
    def data_ranks(self) -> int:
        """Among how many ranks the samples of a step are divided."""
        return self.replicate * self.shard

    def check(self, world_size: int) -> None:
        if self.world_size != world_size:
            raise InputError(
                f"plan.mesh: {self} is {self.world_size} ranks, but there are {world_size}",
                hint=f"use --nproc {self.world_size}, or change plan.mesh",
                field="plan.mesh",
                found=self.world_size,
                allowed=world_size,
            )

    def __str__(self) -> str:
        split = [f"{name} {ways}" for name, ways in self.model_dump().items() if ways > 1]
        return " × ".join(split) or "1 rank"


class Plan(BaseModel):
    """A complete plan. As the `plan:` block of a recipe, only the fields that were written count (`fixed`)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    mesh: Mesh = Mesh()
    zero: int = Field(0, ge=0, le=3)
    micro_batch: int = Field(1, ge=1)
    accumulate: int = Field(1, ge=1)
    accumulate_dtype: Literal["fp32", "parameters"] = "fp32"  # of sums over micro-batches, if parameters are 16 bit
    precision: Precision = "fp32"
    recompute: Literal["none", "selective", "full"] = "none"
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    stages_per_rank: int = Field(1, ge=1)
    compile: bool = False
    offload: Literal["none", "cpu"] = "none"
    workers: int = Field(0, ge=0)
    checkpoint_every: Interval = "10m"
    bucket_mib: int = Field(25, ge=1)  # gradients are reduced in buckets of this size while backward goes on
    channels_last: bool = False  # memory layout of images and convolution weights that tensor cores prefer
    data_on_device: bool = True  # datasets that are small and in memory are kept on the training device

    @property
    def fixed(self) -> frozenset[str]:
        """Names of the fields that were given rather than left to the planner."""
        return frozenset(self.model_fields_set)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        return validated(cls, read_document(Path(path)), str(path))

    def to_yaml(self, reasons: Mapping[str, str] | None = None) -> str:
        """The plan as a file, each choice with its reason as a comment."""
        lines = []
        for key, value in self.model_dump().items():
            text = dump_yaml({key: value}).rstrip() if not isinstance(value, dict) else f"{key}: {_flow(value)}"
            reason = (reasons or {}).get(key)
            lines.append(f"{text:<44}# {reason}" if reason else text)
        return "\n".join(lines) + "\n"

    def check(self, batch: int, world_size: int) -> None:
        """Refuse combinations that cannot be, with the numbers."""
        mesh = self.mesh
        mesh.check(world_size)
        if (mesh.shard > 1) != (self.zero >= 1):
            raise InputError(
                f"plan: mesh.shard is {mesh.shard} and zero is {self.zero}: "
                "sharding over more than one rank needs zero 1, 2 or 3, and the other way round",
                field="plan.zero",
                found=self.zero,
                allowed="1, 2 or 3" if mesh.shard > 1 else "0",
            )
        if (mesh.shard * mesh.context) % mesh.expert:
            raise InputError(
                f"plan.mesh.expert: {mesh.expert} does not divide shard {mesh.shard} × context {mesh.context}"
                f" = {mesh.shard * mesh.context}",
                field="plan.mesh.expert",
                found=mesh.expert,
                allowed=f"a divisor of {mesh.shard * mesh.context}",
            )
        product = self.micro_batch * self.accumulate * mesh.data_ranks
        if product != batch:
            raise InputError(
                f"batch: {batch} samples cannot be split as micro_batch {self.micro_batch} × accumulate "
                f"{self.accumulate} × {mesh.data_ranks} data ranks = {product}",
                hint=f"a batch that this plan can split: {max(1, round(batch / product)) * product}",
                field="batch",
                found=batch,
                allowed=f"micro_batch × accumulate × replicate × shard = {product}",
            )


def _flow(mapping: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in mapping.items()) + "}"
