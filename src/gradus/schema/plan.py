"""Plan: how a recipe is cut up over the ranks of a cluster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gradus.schema.errors import InputError
from gradus.schema.intervals import Interval
from gradus.schema.loading import dump_yaml, read_document, validated

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp64"]
Scaling = Literal["tensor", "row", "block", "mx"]  # of fp8: what shares one scale


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

    @property
    def shards(self) -> int:
        """Over how many ranks parameters are sharded, with zero 1 to 3: the d of the formulas."""
        return self.shard * self.context

    def check(self, world_size: int) -> None:
        """Refuse a shape that cannot be, with the numbers and the nearest shapes that can."""
        if self.world_size != world_size:
            near = " or ".join(mesh.flow() for mesh in self.nearest(world_size))
            raise InputError(
                f"plan.mesh: {self} is {self.world_size} ranks, but there are {world_size}",
                hint=f"use --nproc {self.world_size} (plan: --gpus), or for {world_size} ranks: plan.mesh={near}",
                field="plan.mesh",
                found=self.world_size,
                allowed=world_size,
            )
        if self.shards % self.expert:
            divisors = [ways for ways in range(1, self.shards + 1) if self.shards % ways == 0]
            fewer = max(ways for ways in divisors if ways < self.expert)
            shard = next(n for n in itertools.count(self.shard) if n * self.context % self.expert == 0)
            raise InputError(
                f"plan.mesh.expert: {self.expert} does not divide shard {self.shard} × context {self.context}"
                f" = {self.shards}, whose ranks hold the experts",
                hint=f"use plan.mesh.expert={fewer}, or plan.mesh.shard={shard}",
                field="plan.mesh.expert",
                found=self.expert,
                allowed=f"a divisor of {self.shards}",
            )

    def nearest(self, world_size: int) -> list[Mesh]:
        """Shapes of this many ranks that are like this one: one dimension changed, else as much of it as fits."""
        found: list[Mesh] = []
        # The outermost first: it changes least about how a model is cut.
        for name in ("replicate", "shard", "pipeline", "context", "tensor"):
            ways = getattr(self, name)
            rest = self.world_size // ways
            if world_size % rest or (ways == 1 and name != "replicate"):
                continue
            mesh = self.model_copy(update={name: world_size // rest})
            if mesh.shards % mesh.expert == 0 and (mesh.shard > 1) == (self.shard > 1):  # zero stays as it is
                found.append(mesh)
        return found[:3] or [self._shrunk(world_size)]

    def _shrunk(self, world_size: int) -> Mesh:
        """Of every dimension what still divides the ranks, innermost first; the rest are replicas."""
        ways, rest = {}, world_size
        for name in ("tensor", "context", "shard", "pipeline"):
            ways[name] = math.gcd(getattr(self, name), rest)
            rest //= ways[name]
        return Mesh(replicate=rest, **ways, expert=math.gcd(self.expert, ways["shard"] * ways["context"]))

    def flow(self) -> str:
        """As `--set plan.mesh=` takes it."""
        return _flow({name: ways for name, ways in self.model_dump().items() if ways > 1})

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
    narrow_weights: bool = False  # the model computes with copies of its parameters, rounded to 16 bits once a step
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_blocks: int | None = Field(None, ge=1)  # only the first so many blocks are recomputed; None: all
    loss_chunks: int = Field(1, ge=1)  # output layer and loss work on so many parts of the tokens, one after the other
    activation_offload: bool = False  # what backward needs of each block waits in host memory
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    stages_per_rank: int = Field(1, ge=1)
    stage_blocks: list[int] | None = None  # blocks of each stage, first to last; None: balanced by cost
    sequence_parallel: bool = True  # with tensor > 1: between blocks each rank holds a slice of the sequence
    context_attention: Literal["auto", "gather", "ring"] = "auto"  # auto: ring on CUDA, gathered keys and values else
    fp8_scaling: Scaling = "tensor"  # what shares one scale; for precision fp8
    compile: bool = False
    cuda_graph: bool = False  # on one GPU: forward, backward and update are each launched as a whole
    offload: Literal["none", "cpu"] = "none"  # where sharded parameters and optimizer state live
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = 0  # processes that load data; auto: each rank measures
    checkpoint_every: Interval = "10m"
    bucket_mib: int = Field(25, ge=1)  # gradients are reduced in buckets of this size while backward goes on
    compression: Literal["none", "bf16"] = "none"  # of gradients while they travel
    synchronise_every: int = Field(1, ge=1)  # local SGD: replicas step alone and are averaged every so many steps
    ranks_per_gpu: int = Field(1, ge=1)  # above 1, ranks share a GPU and talk through gloo: NCCL refuses that
    memory_limit_gib: float | None = Field(None, gt=0)  # of a rank, that torch may allocate on its GPU
    channels_last: bool = False  # memory layout of images and convolution weights that tensor cores prefer
    data_on_device: bool = True  # datasets that are small and in memory are kept on the training device

    @property
    def fixed(self) -> frozenset[str]:
        """Names of the fields that were given rather than left to the planner."""
        return frozenset(self.model_fields_set)

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the parameters.

        It does so as well where tensor parallelism has made DTensors of them, which DDP does not take: their gradients
        are then averaged over replicas, with shards of the whole.
        """
        averaged = self.mesh.replicate * self.mesh.shard * self.mesh.context > 1
        return self.zero >= 1 or (self.mesh.tensor > 1 and averaged)

    @property
    def divided(self) -> bool:
        """Whether a rank holds less than the whole model."""
        return self.sharded or self.mesh.tensor > 1 or self.mesh.pipeline > 1

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        return validated(cls, read_document(Path(path)), str(path))

    def to_yaml(self, reasons: Mapping[str, str] | None = None) -> str:
        """The plan as a file, each choice with its reason as a comment."""
        lines = []
        for key, value in self.model_dump().items():
            text = dump_yaml({key: value}).rstrip() if not isinstance(value, dict) else f"{key}: {_flow(value)}"
            reason = (reasons or {}).get(key)
            lines.append(f"{text:<43} # {reason}" if reason else text)
        return "\n".join(lines) + "\n"

    def check(self, batch: int, world_size: int) -> None:
        """Refuse combinations that cannot be, with the numbers."""
        mesh = self.mesh
        mesh.check(world_size)
        if mesh.shard > 1 and self.zero == 0:
            raise InputError(
                f"plan.zero: found 0, but mesh.shard is {mesh.shard}: sharding over more than one rank needs zero "
                "1, 2 or 3",
                hint=f"use plan.zero=3, or plan.mesh.replicate={mesh.replicate * mesh.shard} in place of shard",
                field="plan.zero",
                found=0,
                allowed="1, 2 or 3",
            )
        if mesh.shard == 1 and self.zero >= 1:
            instead = f"plan.mesh.shard={mesh.replicate} in place of replicate" if mesh.replicate > 1 else "more ranks"
            raise InputError(
                f"plan.zero: found {self.zero}, but mesh.shard is 1: there is no second rank to share with",
                hint=f"use plan.zero=0, or {instead}",
                field="plan.zero",
                found=self.zero,
                allowed="0",
            )
        self._check_batch(batch)

    def _check_batch(self, batch: int) -> None:
        ranks = self.mesh.data_ranks
        product = self.micro_batch * self.accumulate * ranks
        if product == batch:
            return
        hint = f"a batch that this plan can split: {max(1, round(batch / product)) * product}"
        if batch % ranks == 0:
            share = batch // ranks
            micro_batch = max(n for n in range(1, min(self.micro_batch, share) + 1) if share % n == 0)
            hint += f"; for batch {batch}: plan.micro_batch={micro_batch}, plan.accumulate={share // micro_batch}"
        raise InputError(
            f"batch: {batch} samples cannot be split as micro_batch {self.micro_batch} × accumulate "
            f"{self.accumulate} × {ranks} data rank{'s' if ranks > 1 else ''} = {product}",
            hint=hint,
            field="batch",
            found=batch,
            allowed=f"micro_batch × accumulate × replicate × shard = {product}",
        )


def _flow(mapping: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in mapping.items()) + "}"
