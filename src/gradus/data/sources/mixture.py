"""`mixture`: several sources, each with a weight, and perhaps other weights from some steps on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from gradus.data.mixing import LARGEST_BLOCK, Mixed, schedule_of
from gradus.data.order import Indices, Words
from gradus.data.orders import shuffled
from gradus.data.source import Batch, Source, source_options
from gradus.data.sources.options import Count, Options
from gradus.data.sources.text import Objective
from gradus.data.split import Split
from gradus.schema.errors import InputError, unknown_name
from gradus.schema.recipe import Shuffle
from gradus.schema.stable_hash import stable_hash

Weights = tuple[Fraction, ...]

# Sources in a mixture. Rounding at the borders of blocks looks for its way by recursion, a few calls for each source.
MOST_SOURCES = 200


class Mixture(Options):
    use = "mixture"

    sources: Annotated[dict[str, dict[str, Any]], Field(min_length=1, max_length=MOST_SOURCES)]
    schedule: list[dict[str, Any]] = Field(default_factory=list)  # [{at: step, weights: {name: weight of each source}}]

    # What all sources have in common, where one does not say otherwise. A reference model brings its own.
    context: Count | None = None
    vocabulary: Count | None = None
    size: Count | None = None
    channels: Literal[1, 3] | None = None
    objective: Objective | None = None

    @property
    def content(self) -> Literal["text", "images"]:  # type: ignore[override]
        return next(iter(self._parts.values())).content

    @property
    def form(self) -> str:
        """Not one that could be foretold: what a batch looks like is for the sources to say."""
        return self.use

    def check(self) -> None:
        contents = {name: part.content for name, part in self._parts.items()}
        if len(set(contents.values())) > 1:
            raise self.refuse("sources", f"some have text and some have images: {_listed(contents)}")
        self.weights()

    def weights(self) -> list[tuple[int, Weights]]:
        """From which step on the sources have which weights; the first from step 0."""
        found = [(0, self._weights({name: keys.get("weight") for name, keys in self.sources.items()}, "sources"))]
        for number, change in enumerate(self.schedule):
            for key in change:
                if key not in ("at", "weights"):
                    raise unknown_name("key", key, ["at", "weights"], field=f"data.schedule.{number}.{key}")
            step, weights = change.get("at"), change.get("weights")
            if type(step) is not int or step <= found[-1][0]:
                allowed = f"a step after {found[-1][0]}"
                message = f"data.schedule.{number}.at: found {step!r}, allowed: {allowed}"
                raise InputError(message, field="data.schedule", found=step, allowed=allowed)
            if not isinstance(weights, Mapping):
                allowed = "a weight for each source: {name: weight}"
                message = f"data.schedule.{number}.weights: found {weights!r}, allowed: {allowed}"
                raise InputError(message, field="data.schedule", found=weights, allowed=allowed)
            for name in weights:
                if name not in self.sources:
                    raise unknown_name("source", name, self.sources, field=f"data.schedule.{number}.weights.{name}")
            named = {name: weights.get(name) for name in self.sources}
            found.append((step, self._weights(named, f"schedule.{number}.weights")))
        return found

    def _weights(self, given: Mapping[str, Any], where: str) -> Weights:
        """As they are written: 0.1 is one tenth, and not the binary fraction next to it."""
        for name, weight in given.items():
            if type(weight) not in (int, float) or not 0 <= weight < float("inf"):
                key = f"data.{where}.{name}" + (".weight" if where == "sources" else "")
                shown = "missing" if weight is None else f"found {weight!r}"
                message = f"{key}: {shown}, allowed: 0 or more; every source has a weight"
                raise InputError(message, field=key, found=weight, allowed="a number, 0 or more")
        weights = tuple(Fraction(str(weight)) for weight in given.values())
        smallest = min((weight for weight in weights if weight), default=None)
        if smallest is None:
            raise InputError(f"data.{where}: all weights are 0", field=f"data.{where}", allowed="one above 0")
        if smallest * LARGEST_BLOCK < sum(weights):
            name = next(name for name, weight in zip(given, weights, strict=True) if weight == smallest)
            share = float(smallest / sum(weights))
            raise InputError(
                f"data.{where}: {name!r} has a share of {share:.1e}, one sample in {1 / share:,.0f}",
                hint=f"a weight of 0 leaves it out; the smallest share is one sample in {LARGEST_BLOCK:,}",
                field=f"data.{where}",
                found=share,
                allowed=f"0, or at least {1 / LARGEST_BLOCK:.1e}",
            )
        return weights

    def open(self, split: Split, seed: int) -> Source:
        opened: dict[str, Source] = {}
        for name, part in self._parts.items():
            if split == "validation" and part.validation == 0:
                continue
            with _blamed(name):
                opened[name] = part.open(split, seed)
        if not opened:
            message = "nothing is held out of any source"
            raise self.refuse("validation", message, hint="validation: 0 for the mixture trains without validation")
        return MixedSource(opened, self.weights() if split == "train" else [])

    @property
    def ready(self) -> bool:
        return all(part.ready for part in self._parts.values())

    def training_samples(self, seed: int) -> int:
        """Without a look at whether they fit together, for which samples are finished, with torch."""
        return sum(part.training_samples(seed) for part in self._parts.values())

    def prepare(self) -> list[Any]:
        prepared = []
        for name, part in self._parts.items():
            with _blamed(name):
                prepared.append(part.prepare())
        return prepared

    def image_shape(self) -> tuple[int, int, int] | None:
        shapes = {name: part.image_shape() for name, part in self._parts.items()}
        known = {name: shape for name, shape in shapes.items() if shape is not None}
        if len(set(known.values())) > 1:
            raise self.refuse("sources", f"images are of different shapes: {_listed(known)}")
        return next(iter(known.values()), None)

    def token_count(self) -> int | None:
        return max((count for part in self._parts.values() if (count := part.token_count()) is not None), default=None)

    @cached_property
    def _parts(self) -> dict[str, Options]:
        """The options of each source, checked."""
        return {name: self._part(name, dict(keys)) for name, keys in self.sources.items()}

    def _part(self, name: str, keys: dict[str, Any]) -> Options:
        from gradus.data.sources import BUILT_IN  # late: this is one of them

        use = keys.pop("use", None)
        keys.pop("weight", None)
        field = f"data.sources.{name}.use"
        if not isinstance(use, str) or use not in BUILT_IN or use == self.use:
            allowed = sorted(set(BUILT_IN) - {self.use})
            if isinstance(use, str) and use != self.use and ":" not in use:
                raise unknown_name("data source", use, allowed, field=field)
            what = {None: "missing", self.use: "a mixture of mixtures has one mixture's weights: name its sources here"}
            raise InputError(
                f"{field}: {what.get(use, f'found {use!r}, but only built-in sources can be mixed')}",
                hint=None if use in what else "mix inside your own dataset, or pack it into shards",
                field=field,
                found=use,
                allowed=allowed,
            )
        known = BUILT_IN[use].model_fields
        common: dict[str, Any] = {
            key: getattr(self, key)
            for key in ("context", "vocabulary", "size", "channels", "objective", "limit")
            if key in known and getattr(self, key) is not None
        }
        if "validation" in self.model_fields_set:
            common["validation"] = self.validation
        with _blamed(name):
            return source_options(use, common | keys)


class MixedSource(Source):
    """The sources one after the other: a sample's number is that in its source, plus the lengths of those before.

    Without weights there is no order of its own: every sample counts the same, as validation wants it.
    """

    def __init__(self, sources: Mapping[str, Source], weights: Sequence[tuple[int, Weights]]) -> None:
        super().__init__(sum(source.length for source in sources.values()))
        self.names, self.sources, self.weights = tuple(sources), tuple(sources.values()), tuple(weights)
        self.starts = np.cumsum([0, *(source.length for source in self.sources)])
        self._check_alike()
        first = self.sources[0]
        self.sample_shape, self.tokens_per_sample = first.sample_shape, first.tokens_per_sample
        self.classes = first.classes
        self.vocabulary = max((v for source in self.sources if (v := source.vocabulary) is not None), default=None)
        self.tokenizer_hash = next((source.tokenizer_hash for source in self.sources if source.tokenizer_hash), None)
        notes = [f"{name}: {source.note}" for name, source in sources.items() if source.note]
        self.note = "; ".join(notes) or None
        fingerprints = [source.fingerprint for source in self.sources if source.fingerprint is not None]
        if len(fingerprints) == len(self.sources):
            self.fingerprint = hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()

    def order(self, seed: int, batch: int, shuffle: Shuffle) -> Mixed | None:
        if not self.weights:
            return None
        schedule = schedule_of([(step * batch, weights) for step, weights in self.weights])
        orders = [
            shuffled(shuffle, stable_hash("mixture", seed, name), source.length)
            for name, source in zip(self.names, self.sources, strict=True)
        ]
        return Mixed(schedule, tuple(orders), self.names)

    def fetch(self, indices: Indices) -> Batch:
        return self._fetched(indices, None)

    def fetch_drawn(self, indices: Indices, draws: Words) -> Batch:
        return self._fetched(indices, draws)

    def finish(self, batch: Any, dtype: Any) -> Any:
        """Each source finishes its own samples; then they go back to the rows where they belong."""
        import torch

        finished = [self.sources[number].finish(part, dtype) for number, part in _by_source(batch).items()]
        rows = batch["rows"]

        def joined(columns: list[Any]) -> Any:
            return torch.cat(columns).index_select(0, rows)

        if isinstance(finished[0], Mapping):
            return {name: joined([part[name] for part in finished]) for name in finished[0]}
        return tuple(joined(list(columns)) for columns in zip(*finished, strict=True))

    def _fetched(self, indices: Indices, draws: Words | None) -> Batch:
        """The raw batches of the sources, side by side: a column is called by the source's number and its name."""
        owners = np.searchsorted(self.starts, indices, side="right") - 1
        raw: dict[str, Any] = {"rows": np.argsort(np.argsort(owners, kind="stable"), kind="stable")}
        for number in np.unique(owners).tolist():
            chosen = owners == number
            own = indices[chosen] - self.starts[number]
            source = self.sources[number]
            part = source.fetch(own) if draws is None else source.fetch_drawn(own, draws[chosen])
            named = part.items() if isinstance(part, dict) else enumerate(part)
            raw |= {f"{number}.{name}": column for name, column in named}
        return raw

    def _check_alike(self) -> None:
        """Samples of all sources must fit into one batch, and mean the same."""
        about: dict[str, list[Any]] = {
            "tokenizers": [source.tokenizer_hash for source in self.sources],
            "numbers of classes": [source.classes for source in self.sources],
            "samples": [_described(source) for source in self.sources],
        }
        for what, values in about.items():
            known = {name: value for name, value in zip(self.names, values, strict=True) if value is not None}
            if len(set(known.values())) > 1:
                raise InputError(
                    f"data.sources: they have different {what}, and cannot be in one batch: {_listed(known)}",
                    hint="give all sources the same form, context, size and tokenizer",
                    field="data.sources",
                    found=known,
                )


def _by_source(batch: Mapping[str, Any]) -> dict[int, Any]:
    """The raw batch of each source. Columns without names are a tuple."""
    parts: dict[int, dict[str, Any]] = {}
    for key, column in batch.items():
        number, dot, name = key.partition(".")
        if dot:
            parts.setdefault(int(number), {})[name] = column
    return {number: tuple(part.values()) if next(iter(part)).isdigit() else part for number, part in parts.items()}


def _described(source: Source) -> str:
    """What a finished sample looks like."""
    import torch

    raw = source.fetch(np.zeros(1, np.int64))
    named = raw.items() if isinstance(raw, dict) else enumerate(raw)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in named}
    finished = source.finish(tensors if isinstance(raw, dict) else tuple(tensors.values()), torch.float32)
    parts = finished.items() if isinstance(finished, Mapping) else enumerate(finished)
    return ", ".join(f"{name} {str(part.dtype).removeprefix('torch.')} {list(part.shape[1:])}" for name, part in parts)


def _listed(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in values.items())


@contextmanager
def _blamed(name: str) -> Iterator[None]:
    """An error about `data.path` of one source is about `data.sources.NAME.path`."""
    try:
        yield
    except InputError as error:
        field = str(error.details.get("field", ""))
        if field.startswith("data.") and error.message.startswith("data."):
            error.message = f"data.sources.{name}.{error.message.removeprefix('data.')}"
            error.args = (error.message,)
            error.details["field"] = f"data.sources.{name}.{field.removeprefix('data.')}"
        raise
