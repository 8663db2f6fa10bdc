"""Export shards: a large model in several files, and an index that says which tensor is where, as Hugging Face has it.

model.safetensors                     a model that is small enough
model-00001-of-00003.safetensors      one that is not, in the order of its tensors
model.safetensors.index.json          {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from gradus.checkpoint.tensor_file import ITEM_BYTES
from gradus.checkpoint.weights import INDEX, SINGLE
from gradus.checkpoint.writing import Writable

SHARD_BYTES = 5 * 10**9  # above which a model is divided: what transformers had as its default until version 5
Files = dict[str, "dict[str, Writable] | str"]


def sharded(tensors: Mapping[str, Writable], shard_bytes: int = SHARD_BYTES) -> Files:
    """The files of a model. A tensor is never divided: one that is larger has a file of its own."""
    shards: list[dict[str, Writable]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = byte_count(tensor)
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    stem = SINGLE.removesuffix(".safetensors")
    files: Files = {
        f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)
    }
    index = {
        "metadata": {"total_size": sum(map(byte_count, tensors.values()))},
        "weight_map": {name: file for file, shard in files.items() for name in shard},
    }
    return {**files, INDEX: json.dumps(index, indent=2) + "\n"}


def byte_count(tensor: Writable) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
