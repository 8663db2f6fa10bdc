"""Fitting: why a rank ran out of memory, in numbers, and which changes of the plan would fit. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gradus.planner.choice.typed import options
from gradus.planner.memory.model_state import ModelSize, ModelState, expected_state
from gradus.schema.plan import Plan, Precision
from gradus.schema.prediction import MemoryPrediction

MOST_RANKS = 1024  # among which sharding is looked for
MOST_CHANGES = 5  # that are told
LOSS_CHUNKS = 8  # of a loss that is computed in parts: an eighth of the logits is little beside anything else
GIB = 2**30


@dataclass(frozen=True)
class Shortage:
    """A rank that ran out of memory: what there is, what it held at that moment, and what it was to hold."""

    where: str  # such as "the backward pass"
    plan: Plan
    batch: int
    held: ModelState  # right then
    used_bytes: int | None  # by tensors of any kind, right then; None: not known, as on a CPU
    asked_bytes: int | None  # by the request that failed
    limit_bytes: int | None  # None: not known, as on a CPU
    limit: str  # where that number comes from
    size: ModelSize | None = None  # None: the model is not there yet, and nobody knows how large it will be
    allows_bf16: bool = True  # the device does
    others_bytes: int = 0  # that other processes hold on the device
    fixed: frozenset[str] = frozenset()  # fields of the plan that the recipe gives, and nobody else changes
    predicted: MemoryPrediction | None = None  # for the worst moment of a step, before the run began
    predicted_at: str = ""  # that moment
    allows_chunks: bool = False  # the model's loss can be computed in parts

    @property
    def rest_bytes(self) -> int:
        """Activations, and buffers of all kinds."""
        return max(0, self.used_bytes - self.held.total) if self.used_bytes is not None else 0

    @property
    def activation_bytes(self) -> int:
        """Activations and buffers of a whole step: what was predicted, but at least what was there."""
        found = self.predicted
        foreseen = found.activations + found.logits + found.communication if found is not None else 0
        return max(self.rest_bytes, foreseen)

    @property
    def expected(self) -> ModelState | None:
        return expected_state(self.size, self.plan) if self.size is not None else None

    @property
    def state_fits(self) -> bool:
        """Whether parameters, gradients and optimizer state alone would fit: then activations are what binds."""
        if self.expected is None or self.limit_bytes is None:
            return True
        return self.expected.total <= self.limit_bytes


@dataclass(frozen=True)
class Change:
    """Keys to set, and what a rank would then need of memory."""

    keys: dict[str, object]
    ranks: int
    why: str
    state: ModelState
    activation_bytes: int  # as predicted, or as far as they had come when memory ran out: at least so many

    @property
    def total_bytes(self) -> int:
        return self.state.total + self.activation_bytes

    @property
    def options(self) -> str:
        """As they are typed."""
        return options(self.keys)

    def document(self) -> dict[str, Any]:
        return {
            "set": self.keys,
            "ranks": self.ranks,
            "state_bytes": self.state.total,
            "activation_bytes_at_least": self.activation_bytes,
        }


def binding_term(shortage: Shortage) -> str:
    """What takes most of what there is too little of."""
    expected = shortage.expected
    if shortage.state_fits or expected is None:
        return "activations"
    terms = {
        "parameters": expected.parameters + expected.master,
        "gradients": expected.gradients,
        "optimizer state": expected.optimizer,
    }
    return max(terms, key=lambda name: terms[name])


def changes_that_fit(shortage: Shortage) -> list[Change]:
    """Those after which a rank needs no more than there is, the smallest first; all of them if the limit is unknown."""
    fitting = []
    for change in _candidates(shortage):
        if shortage.limit_bytes is None or change.total_bytes <= shortage.limit_bytes:
            fitting.append(change)
    return fitting[:MOST_CHANGES]


def _candidates(shortage: Shortage) -> Iterator[Change]:
    """From what only costs time to what needs more GPUs."""
    if shortage.size is None:
        return
    plan = shortage.plan
    narrow = shortage.allows_bf16 and plan.precision in ("fp32", "tf32")
    if shortage.state_fits:
        yield from _chunked_loss(shortage)
        yield from _smaller_micro_batch(shortage)
        if plan.recompute != "full" or plan.recompute_blocks is not None:
            yield _recomputed(shortage)
        if narrow:
            yield _changed(shortage, {"precision": "bf16"}, "activations of matrix multiplications are half as large")
    yield from _sharded(shortage, plan.precision)
    if narrow:
        yield from _sharded(shortage, "bf16")
    yield from _offloaded(shortage, "bf16" if narrow else plan.precision)


def _chunked_loss(shortage: Shortage) -> Iterator[Change]:
    """Where logits were to be there at the worst moment, which costs next to nothing to change."""
    logits = shortage.predicted.logits if shortage.predicted is not None else 0
    if not logits or not shortage.allows_chunks or shortage.plan.loss_chunks > 1 or shortage.plan.mesh.tensor > 1:
        return
    change = _changed(shortage, {"loss_chunks": LOSS_CHUNKS}, "output layer and loss, a part of the tokens at a time")
    less = logits - logits // LOSS_CHUNKS
    yield replace(change, activation_bytes=shortage.activation_bytes - less)


def _smaller_micro_batch(shortage: Shortage) -> Iterator[Change]:
    """The largest that fits, as the plan cuts the batch up now."""
    plan = shortage.plan
    share = plan.micro_batch * plan.accumulate
    for micro_batch in range(plan.micro_batch - 1, 0, -1):
        if share % micro_batch == 0:
            keys = {"micro_batch": micro_batch, "accumulate": share // micro_batch}
            change = _changed(shortage, keys, "the batch stays as it is, in smaller pieces")
            if shortage.limit_bytes is None or change.total_bytes <= shortage.limit_bytes or micro_batch == 1:
                yield change
                return


def _recomputed(shortage: Shortage) -> Change:
    """Of each block only the input is kept. One block at a time is there whole, so the rest is at least that."""
    size = shortage.size
    assert size is not None
    blocks = max(1, (size.parameters - size.outside_blocks) // max(1, size.largest_block))
    everywhere = {"recompute": "full", "recompute_blocks": None}
    change = _changed(shortage, everywhere, "activations of blocks are computed twice, a third more work")
    return replace(change, activation_bytes=change.activation_bytes // blocks)


def _sharded(shortage: Shortage, precision: Precision) -> Iterator[Change]:
    """Each stage of ZeRO over the fewest ranks that do; a later stage only where it needs fewer."""
    plan, fewest = shortage.plan, MOST_RANKS + 1
    for zero in range(max(1, plan.zero), 4):
        for ranks in _rank_counts(shortage):
            if ranks >= fewest or (zero, ranks) == (plan.zero, plan.mesh.shard):
                continue
            why = {
                1: "optimizer state is divided",
                2: "optimizer state and gradients are divided",
                3: "optimizer state, gradients and parameters are divided",
            }[zero]
            keys: dict[str, Any] = {"mesh.shard": ranks, "zero": zero, "precision": precision}
            change = _changed(shortage, keys, f"{why} over {ranks} ranks")
            if shortage.limit_bytes is None or change.total_bytes <= shortage.limit_bytes:
                fewest = ranks
                yield change
                break


def _offloaded(shortage: Shortage, precision: Precision) -> Iterator[Change]:
    if shortage.plan.offload == "cpu":
        return
    ranks = next(iter(_rank_counts(shortage)), None)
    if ranks is not None:
        keys: dict[str, Any] = {"mesh.shard": ranks, "zero": 3, "precision": precision, "offload": "cpu"}
        yield _changed(shortage, keys, "parameters and optimizer state wait in host memory, which is slow")


def _rank_counts(shortage: Shortage) -> Iterator[int]:
    """Over how many ranks the batch can be shared: those that are there first, then twice as many, and so on."""
    mesh = shortage.plan.mesh
    ranks = max(2, mesh.replicate * mesh.shard)
    while ranks <= MOST_RANKS:
        if shortage.batch % ranks == 0:
            yield ranks
        ranks *= 2


def _changed(shortage: Shortage, values: dict[str, Any], why: str) -> Change:
    """The plan with these values, the batch cut up anew where ranks were added."""
    assert shortage.size is not None
    plan, mesh = shortage.plan, shortage.plan.mesh
    shard = values.get("mesh.shard", mesh.shard)
    if "mesh.shard" in values:
        mesh = mesh.model_copy(update={"shard": shard, "replicate": 1})
    share = shortage.batch // mesh.data_ranks
    micro_batch = values.get("micro_batch", min(plan.micro_batch, share))
    while share % micro_batch:
        micro_batch -= 1
    split = {"micro_batch": micro_batch, "accumulate": share // micro_batch}
    plain = {key: value for key, value in values.items() if key != "mesh.shard"}
    new = plan.model_copy(update={**split, **plain, "mesh": mesh})
    activations = shortage.activation_bytes * micro_batch / plan.micro_batch
    if new.precision == "bf16" != plan.precision:
        activations /= 2
    keys: dict[str, object] = {f"plan.{key}": v for key, v in values.items() if _differs(plan, key, v)}
    if "mesh.shard" in values and plan.mesh.replicate > 1:
        keys["plan.mesh.replicate"] = 1
    for key, value in split.items():
        if key in shortage.fixed and getattr(plan, key) != value:
            keys[f"plan.{key}"] = value
    return Change(keys, new.mesh.world_size, why, expected_state(shortage.size, new), round(activations))


def _differs(plan: Plan, key: str, value: object) -> bool:
    return bool((plan.mesh.shard if key == "mesh.shard" else getattr(plan, key)) != value)
