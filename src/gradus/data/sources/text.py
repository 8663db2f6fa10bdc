"""What all text sources share: windows of tokens, to be continued (`next`) or to be filled in (`masked`)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from gradus.data.order import Indices, noise
from gradus.data.source import Batch, Source
from gradus.data.split import Part
from gradus.schema.stable_hash import stable_hash

Objective = Literal["next", "masked"]
Tokens = NDArray[Any]

IGNORED = -100  # the target that PyTorch's cross-entropy leaves out
MASKED_SHARE = 0.15
COLUMN_CHUNK = 4096


@dataclass(frozen=True)
class Masking:
    """BERT's corruption: of the chosen 15 %, 80 % become the mask token, 10 % a random one, 10 % stay as they are."""

    seed: int
    mask_token: int
    vocabulary: int

    def apply(self, tokens: Tokens, indices: Indices, real: NDArray[np.bool_] | None = None) -> dict[str, Tokens]:
        """A pure function of (seed, index): a sample has the same mask in each epoch and on any hardware.

        Where not all tokens are `real`, padding is left alone.
        """
        context = tokens.shape[1]
        counters = indices[:, None] * context + np.arange(context)
        which, how, random = (
            noise(stable_hash(self.seed, "mask", word), counters) for word in ("which", "how", "random")
        )

        # The same number in each sample, and never none: a batch without a target would have no loss.
        if real is None:
            count = max(1, round(MASKED_SHARE * context))
            chosen = which <= np.partition(which, count - 1, axis=1)[:, count - 1, None]
        else:
            which = np.where(real, which, np.iinfo(which.dtype).max)
            counts = np.maximum(1, np.rint(MASKED_SHARE * real.sum(axis=1)).astype(np.int64))
            largest = np.take_along_axis(np.sort(which, axis=1), counts[:, None] - 1, axis=1)
            chosen = (which <= largest) & real

        tenths = how % np.uint64(10)
        random_tokens = (random % np.uint64(self.vocabulary)).astype(tokens.dtype)
        mask_token, ignored = tokens.dtype.type(self.mask_token), np.promote_types(tokens.dtype, np.int8).type(IGNORED)
        corrupted = np.where(tenths < 8, mask_token, np.where(tenths < 9, random_tokens, tokens))
        return {"tokens": np.where(chosen, corrupted, tokens), "targets": np.where(chosen, tokens, ignored)}


class TextSource(Source):
    """Token windows of one length."""

    def __init__(self, length: int, context: int, vocabulary: int | None, masking: Masking | None) -> None:
        super().__init__(length)
        self.context = context
        self.masking = masking
        self.vocabulary = vocabulary
        self.tokens_per_sample = context
        self.sample_shape = (context,)

    @abstractmethod
    def windows(self, indices: Indices) -> Tokens:
        """[len(indices), context + 1]: what the model sees, and one token more, the target of the last."""

    def fetch(self, indices: Indices) -> dict[str, Tokens]:
        windows = self.windows(indices)
        return {"tokens": windows} if self.masking is None else self.masking.apply(windows[:, :-1], indices)

    def finish(self, batch: Any, dtype: Any) -> Any:
        if self.masking is None:
            windows = batch["tokens"]
            return {"tokens": windows[:, :-1].long(), "targets": windows[:, 1:].long()}
        return {name: column.long() for name, column in batch.items()}


class TextWindows(TextSource):
    """Windows cut from one long text, `context` apart, so that each token is a target once."""

    def __init__(self, text: Tokens, part: Part, context: int, vocabulary: int | None, masking: Masking | None) -> None:
        super().__init__(part.length, context, vocabulary, masking)
        self.text = text
        self.part = part

    @staticmethod
    def count(tokens: int, context: int) -> int:
        """How many windows fit into a text."""
        return max(tokens - 1, 0) // context

    def windows(self, indices: Indices) -> Tokens:
        starts = self.part.locate(indices) * self.context
        return np.asarray(sliding_window_view(self.text, self.context + 1)[starts])

    @property
    def columns(self) -> Batch | None:
        # In chunks, because masks take some fifty bytes of scratch for each token.
        chunks = [
            self.fetch(np.arange(start, min(start + COLUMN_CHUNK, len(self))))
            for start in range(0, len(self), COLUMN_CHUNK)
        ]
        return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def in_form(form: str, finished: dict[str, Any], *, masked: bool) -> dict[str, Any]:
    """Windows by the names that a model wants: `tokens`, or those of Hugging Face's.

    Their causal models shift the labels themselves; of masked ones, labels are what was masked.
    """
    if form == "tokens":
        return finished
    return {"input_ids": finished["tokens"], "labels": finished["targets" if masked else "tokens"]}
