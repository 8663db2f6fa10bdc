"""Fused norms: a part whose kernels widen numbers as they read them. No torch.

In eager mode a norm in fp32 over 16-bit activations first writes them out in fp32, and keeps that for backward. A fused
kernel, as Megatron-LM has them, keeps the 16-bit ones instead.
"""

from __future__ import annotations

from dataclasses import replace

from gradus.planner.profile.program import ModelProfile, Part, Storage

CAST = "_to_copy"
MOST_REMEMBERED = 64

# By identity, so that a profile's parts are the same ones each time; it is kept, so that its number is nobody else's.
_remembered: dict[int, tuple[ModelProfile, ModelProfile]] = {}


def profile_with_fused_norms(profile: ModelProfile) -> ModelProfile:
    """The profile with such norms in all of its parts."""
    if len(_remembered) >= MOST_REMEMBERED:
        _remembered.clear()
    if id(profile) not in _remembered:
        parts = tuple(map(with_fused_norms, profile.parts))
        _remembered[id(profile)] = (profile, replace(profile, parts=parts))
    return _remembered[id(profile)][1]


def with_fused_norms(part: Part) -> Part:
    """The part with every wider copy that is kept for backward replaced by what it was made from."""
    ends = len(part.forward)
    storages = list(part.storages)
    for number, operator in enumerate(part.forward):
        if operator.name != CAST or len(operator.reads) != 1 or len(operator.writes) != 1:
            continue
        (source,), (copy,) = operator.reads, operator.writes
        kept = storages[copy]
        if kept.role != "activation" or kept.last < ends or kept.bytes.at(1) <= storages[source].bytes.at(1):
            continue
        readers = [n for n, op in enumerate(part.forward) if copy in op.reads]
        storages[copy] = replace(kept, last=max(readers, default=number))
        storages[source] = _kept_until(storages[source], kept.last)
    return replace(part, storages=tuple(storages))


def _kept_until(storage: Storage, last: int) -> Storage:
    return replace(storage, made=max(0, storage.made), last=max(storage.last, last))
