"""Data of every kind, and the stream of samples that ranks of any number read of it."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
from training_cases import CLUSTER, recipe_for

from gradus.data.loader import Indexed, Loader, MicroBatch, Slices
from gradus.data.order import Indices, Order
from gradus.data.orders import order_for
from gradus.data.shards.origins import Records
from gradus.data.shards.packing import HowToPack, pack
from gradus.data.source import Batch, Source
from gradus.data.sources.mixture import MixedSource
from gradus.parallel.world import World
from gradus.planner.defaults import default_plan
from gradus.record.directory import RunDirectory
from gradus.schema.recipe import Recipe
from gradus.training.building import open_data
from gradus.training.live_run import LiveRun
from gradus.training.loop import train

BATCH, STEPS, SEED = 12, 14, 7
SHAPES = [
    (ranks, accumulate) for ranks in (1, 2, 3, 4) for accumulate in (1, 2, 3) if BATCH % (ranks * accumulate) == 0
]
MODEL = {"use": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 24, "vocabulary": 256}

Stream = dict[int, bytes]  # by position, what identifies the sample that was there


def write_files(folder: Path) -> None:
    """Texts of different lengths, conversations, and shards of the texts."""
    draw = random.Random(5)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(5, 90))) for _ in range(40)]
    (folder / "texts").mkdir()
    (folder / "texts" / "some.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    chats = [{"prompt": "x", "answer": text[: draw.randint(1, 9)] + str(i)} for i, text in enumerate(texts)]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    pack(Records(str(folder / "texts")), folder / "shards", HowToPack(shard_bytes=2**16), workers=1)


def data_of(folder: Path) -> dict[str, dict[str, Any]]:
    """`data:` blocks. None of them has so many samples that a run would not begin a second epoch."""
    texts = {"use": "text", "path": str(folder / "texts")}
    made = {"use": "synthetic-tokens", "samples": 41}
    shards = {"use": "shards", "path": str(folder / "shards")}
    changes = [{"at": 3, "weights": {"texts": 0, "made": 2}}, {"at": 9, "weights": {"texts": 0.37, "made": 0.63}}]
    return {
        "mixture": {
            "use": "mixture",
            "sources": {"texts": {**texts, "weight": 3.14159}, "made": {**made, "weight": 2.71828}},
            "schedule": changes,
        },
        "packed": {**texts, "packing": True},
        "grouped": {"use": "chat", "path": str(folder / "chat.jsonl"), "group_by_length": 3},
        "blocks": {**texts, "shuffle": {"blocks": 7, "window": 3}},
        "sharded": shards,
        "all": {
            "use": "mixture",
            "sources": {"a": {**shards, "packing": True, "weight": 1}, "b": {**texts, "packing": True, "weight": 0.3}},
            "shuffle": {"blocks": 5, "window": 2},
        },
    }


KINDS = list(data_of(Path()))


def recipe_of(data: dict[str, Any], **changes: Any) -> Recipe:
    document = {"model": MODEL, "data": data, "batch": BATCH, "steps": STEPS, "seed": SEED, **changes}
    return recipe_for("gpt", **document)


class Opened(NamedTuple):
    data: Indexed
    order: Order


def opened(data: dict[str, Any]) -> Opened:
    recipe = recipe_of(data)
    train = open_data(recipe, "train")
    assert train is not None
    return Opened(train, order_for(train, recipe.data, recipe.seed, recipe.batch))


class Numbers(Source):
    """Sample i of source k is the number 1000 k + i."""

    sample_shape = (1,)

    def __init__(self, number: int, length: int) -> None:
        super().__init__(length)
        self.first = 1000 * number

    def fetch(self, indices: Indices) -> Batch:
        return {"tokens": self.first + indices[:, None]}

    def finish(self, batch: Any, dtype: Any) -> Any:
        return {"tokens": batch["tokens"], "targets": batch["tokens"]}


def numbered(weights: Sequence[tuple[int, Sequence[int]]], lengths: Sequence[int]) -> MixedSource:
    """A mixture of sources of these lengths, with other weights from some steps on."""
    fractions = [(step, tuple(map(Fraction, given))) for step, given in weights]
    return MixedSource({str(number): Numbers(number, length) for number, length in enumerate(lengths)}, fractions)


def read(
    source: Opened, steps: range, ranks: int = 1, accumulate: int = 1, workers: int = 0, skipped: Any = ()
) -> Stream:
    """What all ranks together read in these steps, each with a loader of its own."""
    found: Stream = {}
    micro_batch = BATCH // (ranks * accumulate)
    for rank in range(ranks):
        data, order = pickle.loads(pickle.dumps(source))  # nothing that a process has done before matters
        slices = Slices(BATCH, micro_batch, accumulate, rank, STEPS * BATCH, skipped)
        loader = Loader(
            data, slices, torch.device("cpu"), torch.float32, seed=SEED, order=order, workers=workers, on_device=False
        )
        note(found, loader.micro_batches(steps.start, steps.stop), slices)
    return found


class Killed(Exception):
    """In place of a signal, which the pool's processes would not survive."""


def trained_on(world: World, folder: str, recipe: Recipe, attempt: int, kill_at: int | None) -> Stream:
    """Train in this process's part of the world, perhaps not to the end; what the model was given."""
    plan = default_plan(recipe, CLUSTER, world.size).plan
    live = LiveRun.from_recipe(recipe, plan, RunDirectory(Path(folder)), attempt, world)
    found: Stream = {}
    deliver = live.loader.micro_batches

    def watched(start: int, end: int) -> Iterator[MicroBatch]:
        for number, micro in enumerate(deliver(start, end)):
            if kill_at is not None and start + number // plan.accumulate == kill_at:
                raise Killed
            note(found, [micro], live.loader.slices)
            yield micro

    live.loader.micro_batches = watched  # type: ignore[method-assign]
    try:
        train(live)
    except Killed:
        live.saving.close()
    live.recorder.close(state="finished" if kill_at is None else "failed")
    return found


def note(stream: Stream, batches: Iterable[MicroBatch], slices: Slices) -> None:
    for micro in batches:
        first = micro.position - sum(end - start for start, end in slices.skipped if start <= micro.position)
        positions = slices.positions((first, micro.samples)).tolist()
        assert positions[0] == micro.position
        for position, row in zip(positions, range(micro.samples), strict=True):
            assert position not in stream, f"position {position} was read twice"
            stream[position] = identity(micro.inputs, row)


def identity(inputs: Any, row: int) -> bytes:
    """A sample without its padding, of which there is more or less beside longer or shorter ones."""
    targets = inputs["targets"][row]
    width = int(torch.nonzero(targets != -100)[-1]) + 1
    return b"|".join(inputs[name][row][:width].long().numpy().tobytes() for name in sorted(inputs))
