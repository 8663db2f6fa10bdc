"""After a stop, the samples that are left come as if it had not stopped: on any ranks, with any workers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_cases import (
    BATCH,
    KINDS,
    MODEL,
    SHAPES,
    STEPS,
    Opened,
    Stream,
    data_of,
    numbered,
    opened,
    read,
    recipe_of,
    trained_on,
    write_files,
)
from gradus_command import Gradus, committed, rank_processes, status, trained, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool

from gradus.data.grouping import Grouped
from gradus.data.loader import Indexed
from gradus.data.sources.mixture import MixedSource
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.process import process_of
from gradus.schema.recipe import BlockShuffle


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("elastic")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADUS_CACHE", str(folder / "cache"))
        write_files(folder)
        yield folder


@pytest.fixture(scope="module", params=KINDS)
def undisturbed(request: pytest.FixtureRequest, files: Path) -> tuple[Opened, Stream]:
    source = opened(data_of(files)[request.param])
    return source, read(source, range(STEPS))


stops = st.lists(st.integers(0, STEPS), max_size=4).map(lambda found: [0, *sorted(found), STEPS])


def test_the_stream_has_every_position_once_and_goes_into_a_second_epoch(undisturbed: tuple[Opened, Stream]) -> None:
    source, stream = undisturbed
    assert sorted(stream) == list(range(STEPS * BATCH))
    assert source.data.length < STEPS * BATCH
    most = max(Counter(stream.values()).values())
    assert most <= 9, "what identifies a sample tells samples apart"


@settings(max_examples=5, deadline=None)
@given(ends=stops, shapes=st.lists(st.sampled_from(SHAPES), min_size=5, max_size=5))
def test_stops_and_other_numbers_of_ranks_change_nothing(
    undisturbed: tuple[Opened, Stream], ends: list[int], shapes: list[tuple[int, int]]
) -> None:
    source, expected = undisturbed
    found: Stream = {}
    for (ranks, accumulate), start, end in zip(shapes, ends, ends[1:], strict=False):
        found |= read(source, range(start, end), ranks, accumulate)
    assert found == expected


@st.composite
def mixtures(draw: st.DrawFn) -> Opened:
    """Sources of any lengths, weights that may change, any seed, any shuffle, and grouped by length or not."""
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    some = st.lists(st.integers(0, 10**6), min_size=len(lengths), max_size=len(lengths)).filter(
        lambda found: 0 < sum(found) < 10**4 * min((weight for weight in found if weight), default=0)
    )
    changes = [(step, draw(some)) for step in [0, *sorted(draw(st.sets(st.integers(1, STEPS), max_size=3)))]]
    data, seed = Indexed(numbered(changes, lengths)), draw(st.integers(0, 2**63))
    blocks = st.builds(BlockShuffle, blocks=st.integers(1, 40), window=st.integers(1, 4))
    assert data.source is not None
    order = data.source.order(seed, BATCH, draw(st.sampled_from(["full", "none"]) | blocks))
    assert order is not None
    if draw(st.booleans()):
        order = Grouped(order, np.arange(data.length) * 7 % 31, seed, BATCH, draw(st.integers(1, 5)))
    return Opened(data, order)


@settings(max_examples=15, deadline=None)
@given(source=mixtures(), ends=stops, shapes=st.lists(st.sampled_from(SHAPES), min_size=5, max_size=5))
def test_any_mixture_in_any_order_goes_on_as_if_nothing_had_happened(
    source: Opened, ends: list[int], shapes: list[tuple[int, int]]
) -> None:
    found: Stream = {}
    for (ranks, accumulate), start, end in zip(shapes, ends, ends[1:], strict=False):
        found |= read(source, range(start, end), ranks, accumulate)
    assert found == read(source, range(STEPS))
    sources = source.data.source
    assert isinstance(sources, MixedSource)
    ids = source.order.at(np.arange(STEPS * BATCH))
    owners = np.searchsorted(sources.starts, ids, side="right") - 1
    numbers = (1000 * owners + ids - sources.starts[owners]).tolist()
    assert [int.from_bytes(found[position][:8], "little") for position in range(len(ids))] == numbers


@settings(max_examples=3, deadline=None)
@given(first=st.integers(0, STEPS * BATCH), count=st.integers(0, 40), shape=st.sampled_from(SHAPES))
def test_what_is_skipped_moves_nothing_else(
    undisturbed: tuple[Opened, Stream], first: int, count: int, shape: tuple[int, int]
) -> None:
    source, expected = undisturbed
    found = read(source, range(STEPS), *shape, skipped=((first, first + count),))
    assert not set(found) & set(range(first, first + count))
    assert {position: found[position] for position in found if position in expected} == {
        position: sample for position, sample in expected.items() if not first <= position < first + count
    }


@pytest.mark.parametrize("workers", [2])
def test_workers_change_nothing(undisturbed: tuple[Opened, Stream], workers: int) -> None:
    source, expected = undisturbed
    found = read(source, range(5, STEPS), 2, 1, workers)
    assert found == {position: sample for position, sample in expected.items() if position >= 5 * BATCH}


def killed_and_resumed(
    pool: Pool, run: RunDirectory, data: dict[str, Any], attempts: list[tuple[int, int, int | None]]
) -> list[Stream]:
    """What each attempt trained on: on so many ranks, with so many workers, killed before a step or not at all."""
    streams = []
    for number, (ranks, workers, kill_at) in enumerate(attempts, start=1):
        recipe = recipe_of(data, checkpoint={"every": 2}, plan={"workers": workers})
        parts = pool.run(ranks, trained_on, str(run.path), recipe, number, kill_at)
        together = {position: sample for part in parts for position, sample in part.items()}
        assert len(together) == sum(map(len, parts)), "no two ranks trained on the same"
        streams.append(together)
    return streams


def test_a_run_that_is_killed_and_goes_on_elsewhere_trains_on_the_same_samples(
    pool: Pool, run: RunDirectory, files: Path
) -> None:
    """Steps after the last checkpoint are done again, on the same samples."""
    data = data_of(files)["all"]
    expected = read(opened(data), range(STEPS))
    streams = killed_and_resumed(pool, run, data, [(2, 0, 5), (1, 1, None)])
    assert streams[0] == {position: sample for position, sample in expected.items() if position < 5 * BATCH}
    begins = min(streams[1])
    assert begins <= 5 * BATCH
    assert streams[1] == {position: sample for position, sample in expected.items() if position >= begins}
    assert any("a mixture: of " in event.get("message", "") for event in read_events(run)), "told in the record"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_runs_that_are_killed_at_random_train_on_the_same_samples(
    pool: Pool, run: RunDirectory, files: Path, kind: str
) -> None:
    data, draw = data_of(files)[kind], random.Random(kind)
    expected = read(opened(data), range(STEPS))
    kills = sorted(draw.sample(range(1, STEPS), 3))
    ranks = draw.sample([1, 2, 3, 4], 4)
    attempts = [(count, draw.choice([0, 1, 2]), kill) for count, kill in zip(ranks, [*kills, None], strict=True)]
    reached = 0
    for stream, (_, _, kill) in zip(killed_and_resumed(pool, run, data, attempts), attempts, strict=True):
        begins, reached_before = min(stream), reached
        reached = STEPS * BATCH if kill is None else kill * BATCH
        assert begins <= reached_before, f"nothing is left out: {attempts}"
        assert stream == {p: sample for p, sample in expected.items() if begins <= p < reached}, attempts


def _has_ended(pid: int) -> bool:
    found = process_of(pid)
    return found is None or found.has_ended


def killed(gradus: Gradus, command: list[str], at_step: int) -> Path:
    """A run that is killed as soon as it has recorded a step; all its ranks are gone."""
    process = gradus.start(*command)
    run: Path = wait_until(lambda: next(gradus.runs.glob("elastic/2*"), None), process)
    wait_until(lambda: max((row["step"] for row in trained(run)), default=0) >= at_step, process, 120)
    rank_0 = status(run)["pid"]
    process.kill()
    gradus.end(process)
    wait_until(lambda: not rank_processes(run) and _has_ended(rank_0))  # one that is ending has no environment
    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "grouped"])
def test_the_record_of_a_run_that_was_killed_three_times_proves_its_samples(
    files: Path, tmp_path: Path, kind: str
) -> None:
    """The real thing: SIGKILL for the launcher and so for all ranks, at any moment, and other ranks afterwards."""
    gradus, draw = Gradus(tmp_path), random.Random(kind)
    changes = {"model": MODEL, "data": data_of(files)[kind], "batch": BATCH, "steps": 400, "checkpoint": {"every": 3}}
    start = ["train", gradus.recipe(name="elastic", **changes)]
    reached = 0
    try:
        for ranks in draw.sample([2, 3, 4], 3):
            kill_at = reached + draw.randint(4, 30)
            run = killed(gradus, [*start, "--nproc", str(ranks)], kill_at)
            reached = max(committed(run), default=0)
            start = ["train", "--resume", str(run)]
        assert gradus(*start, "--nproc", "1").code == 0
        audit = gradus("data", "audit", str(run), "--json")
    finally:
        gradus.stop_all()
    assert audit.code == 0, audit.out
    assert [row["step"] for row in trained(run)][-1] == 400


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    ends=st.lists(st.integers(0, STEPS), max_size=6).map(lambda found: [0, *sorted(found), STEPS]),
    shapes=st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from([0, 0, 0, 1])), min_size=7, max_size=7),
)
def test_many_stops_on_many_shapes_change_nothing(
    undisturbed: tuple[Opened, Stream], ends: list[int], shapes: list[tuple[tuple[int, int], int]]
) -> None:
    source, expected = undisturbed
    found: Stream = {}
    for ((ranks, accumulate), workers), start, end in zip(shapes, ends, ends[1:], strict=False):
        found |= read(source, range(start, end), ranks, accumulate, workers)
    assert found == expected
