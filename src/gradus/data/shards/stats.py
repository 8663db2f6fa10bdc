"""Statistics of a dataset: how much there is of what. All of it from the index, but for the sizes of pictures."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import permuted
from gradus.data.shards.index import MISSING
from gradus.data.shards.reading import Shards
from gradus.data.source import Source
from gradus.data.sources.tokenised import Prepared
from gradus.data.tokenised import Mapped
from gradus.schema.stable_hash import stable_hash

PICTURES = 1000  # whose sizes are looked at


def dataset_stats(shards: Shards) -> dict[str, Any]:
    """What `gradus data stats` shows of shards."""
    description, index = shards.description, shards.index
    document: dict[str, Any] = {
        "path": shards.storage.folder,
        "content": description.content,
        "samples": dict(description.samples),
        "shards": len(description.shards),
        "bytes": sum(shard.bytes for shard in description.shards),
        "index_bytes": description.index.bytes,
        "fingerprint": description.fingerprint,
        "parts": [
            {"name": part.name, "suffixes": list(part.suffixes), "samples": part.samples, "bytes": part.bytes}
            for part in description.parts
        ],
    }
    if index.labels is not None:
        names = description.classes or tuple(str(number) for number in range(description.class_count or 0))
        document["classes"] = class_counts(index.labels, names)
    if index.text_bytes is not None:
        document["document_bytes"] = lengths_stats(index.text_bytes)
    if description.tokens is not None and index.tokens is not None:
        document["tokens"] = description.tokens.count
        document["vocabulary"] = description.tokens.vocabulary
        document["tokenizer"] = description.tokens.tokenizer
        document["document_tokens"] = lengths_stats(np.diff(index.tokens))
    image = description.image_part()
    if image is not None:
        document["image_sizes"] = _image_sizes(shards, description.parts.index(image))
    return document


def source_stats(splits: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the opened splits of any source, or of a user's dataset."""
    train = splits["train"]
    document: dict[str, Any] = {"samples": {split: len(data) for split, data in splits.items()}}
    if not isinstance(train, Source):
        return document
    document |= {"tokens_per_sample": train.tokens_per_sample, "vocabulary": train.vocabulary}
    if train.tokens_per_sample is not None:
        document["tokens"] = {split: len(data) * train.tokens_per_sample for split, data in splits.items()}
    labels = getattr(train, "labels", None)
    if train.classes is not None and isinstance(labels, np.ndarray):
        document["classes"] = class_counts(labels, tuple(map(str, range(train.classes))))
    else:
        document["classes"] = train.classes
    document["note"] = train.note
    return document


def tokens_stats(prepared: Prepared) -> dict[str, Any]:
    """Of texts that were tokenised into the cache: tokens and the lengths of documents, of both splits together."""
    offsets = [Mapped(prepared.folder / f"{split}.offsets.bin", "int64").array for split in ("train", "validation")]
    return {
        "tokens": prepared.meta["tokens"],
        "documents": prepared.meta["documents"],
        "document_tokens": lengths_stats(np.concatenate([np.diff(each) for each in offsets])),
    }


def class_counts(labels: NDArray[Any], names: tuple[str, ...]) -> dict[str, int]:
    counts = np.bincount(labels[labels >= 0], minlength=len(names))
    known = dict(zip(names, counts.tolist(), strict=False))
    missing = int(np.count_nonzero(labels < 0))
    return known | ({"(none)": missing} if missing else {})


def lengths_stats(lengths: NDArray[Any]) -> dict[str, Any]:
    """Smallest, median, 95th percentile, largest, and how many there are up to each power of two."""
    if not len(lengths):
        return {"count": 0}
    quantiles = np.percentile(lengths, [50, 95], method="lower")
    bits = np.ceil(np.log2(np.maximum(lengths, 1).astype(np.float64))).astype(np.int64)
    counts = np.bincount(bits)
    first = int(np.flatnonzero(counts)[0])
    return {
        "count": len(lengths),
        "sum": int(lengths.sum(dtype=np.int64)),
        "min": int(lengths.min()),
        "median": int(quantiles[0]),
        "p95": int(quantiles[1]),
        "max": int(lengths.max()),
        "histogram": [{"up_to": 2**bit, "count": int(counts[bit])} for bit in range(first, len(counts))],
    }


def _image_sizes(shards: Shards, part: int) -> dict[str, Any] | None:
    try:
        from PIL import Image
    except ImportError:
        return None
    count = min(PICTURES, len(shards))
    chosen = np.sort(permuted(stable_hash("pictures to look at"), len(shards), np.arange(count)))
    chosen = chosen[shards.index.offsets[chosen, part] != MISSING]
    sizes: Counter[tuple[int, int]] = Counter()
    unreadable = 0
    for data in shards.read(chosen, part):
        try:
            with Image.open(io.BytesIO(data)) as picture:
                sizes[picture.size] += 1
        except Exception:  # Pillow raises what its decoders raise
            unreadable += 1
    if not sizes:
        return {"looked_at": len(chosen), "unreadable": unreadable}
    sides = {name: sorted(size[axis] for size in sizes.elements()) for axis, name in enumerate(("width", "height"))}
    return {
        "looked_at": len(chosen),
        "unreadable": unreadable,
        **{name: {"min": s[0], "median": s[len(s) // 2], "max": s[-1]} for name, s in sides.items()},
        "most_common": [{"width": w, "height": h, "count": n} for (w, h), n in sizes.most_common(3)],
    }
