"""Readable: the tokens of a sample as text again, in pieces that are in the loss and pieces that are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from gradus.data.source import Source
from gradus.data.sources.text import IGNORED
from gradus.data.tokenizer import Tokenizer

END_SHOWN = "<end of text>"


class Shown(NamedTuple):
    text: str
    in_loss: bool


def readable(source: Source, batch: Mapping[str, Any], tokenizer: Tokenizer) -> list[Shown]:
    """The first sample of a batch as the model gets it. Padding at its end is left out."""
    columns = {name: [int(value) for value in column[0]] for name, column in batch.items()}
    form = getattr(source, "form", "tokens")
    if form == "seq2seq":
        prompt = [t for t, seen in zip(columns["input_ids"], columns["attention_mask"], strict=True) if seen]
        answer = [t for t in columns["labels"] if t != IGNORED]
        pairs = [(t, False) for t in prompt] + [(t, True) for t in answer]
    elif getattr(source, "masking", None) is not None or form == "huggingface":
        ids, labels = ("input_ids", "labels") if "labels" in columns else ("tokens", "targets")
        pairs = [(t, label != IGNORED) for t, label in zip(columns[ids], columns[labels], strict=True)]
    else:  # each target is the token that follows
        targets = columns["targets"]
        known = [target != IGNORED for target in targets]
        last = [(targets[-1], True)] if known[-1] else []
        # Of the first token nothing is asked here; in a text that is cut into windows, the window before asks for it.
        pairs = list(zip(columns["tokens"], [all(known), *known[:-1]], strict=True)) + last
    while pairs and pairs[-1] == (tokenizer.end_of_text, False):
        pairs.pop()
    runs = [([token for token, _ in run], in_loss) for in_loss, run in groupby(pairs, key=lambda pair: pair[1])]
    return [Shown(_text(run, tokenizer), in_loss) for run, in_loss in runs]


def _text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    runs = groupby(ids, key=lambda token: token == tokenizer.end_of_text)
    return "".join(END_SHOWN * len(list(run)) if ends else tokenizer.decode(list(run)) for ends, run in runs)
