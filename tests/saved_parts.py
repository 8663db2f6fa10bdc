"""Checkpoints as several ranks write them, made by one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradus.checkpoint.commit import commit
from gradus.checkpoint.part import lay_out, part_name, write_part, write_record
from gradus.checkpoint.reading import NAMES
from gradus.checkpoint.writing import one_at_a_time


def save_in_parts(
    folder: Path, step: int, tensors: Mapping[str, Tensor], ranks: int, document: Mapping[str, Any] | None = None
) -> Path:
    """A checkpoint whose tensors have rows on each rank, as even as can be; what has too few rows is on one of them."""
    path = folder / f"step-{step:08d}"
    boxes: list[list[Any]] = [[] for _ in range(ranks)]
    held: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    for number, (name, tensor) in enumerate(tensors.items()):
        whole = tuple(tensor.shape)
        divided = tensor.dim() > 0 and tensor.shape[0] >= ranks
        parts = torch.tensor_split(tensor, ranks) if divided else [tensor]
        first = 0
        for rank, part in enumerate(parts, 0 if divided else number % ranks):
            offset = (first, *(0 for _ in whole[1:])) if whole else ()
            boxes[rank].append((name, NAMES[tensor.dtype], whole, offset, tuple(part.shape)))
            held[rank][name] = part
            first += part.shape[0] if whole else 0
    for rank in range(ranks):
        layout = lay_out(part_name(rank, ranks), boxes[rank])
        data = one_at_a_time(layout, held[rank].__getitem__)
        write_record(path, write_part(path, layout, data, abandoned=lambda: False))
    commit(path, step, ranks, {"state": {}, **(document or {})}, abandoned=lambda: False)
    return path
