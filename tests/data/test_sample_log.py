"""What a rank trained on, as its sample log has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradus.data.loader import Indexed, Loader, Slices
from gradus.data.order import Shuffled, past_skipped
from gradus.data.sample_log import (
    MOST_CHUNKS,
    Runs,
    SampleLog,
    delivered_digest,
    delivered_digests,
    expanded,
)
from gradus.data.source import open_source
from gradus.record.append_log import read_lines

ORDER = Shuffled(3, 1000)
BEGIN = {"batch": 8, "data_ranks": 2, "total_samples": 800, "specification": "abc"}


def noted(log: SampleLog, step: int, first: int, count: int) -> None:
    positions = np.arange(first, first + count)
    log.note(step, first, count, delivered_digest(positions, ORDER.at(positions)))


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1, max_size=20), st.randoms())
def test_a_digest_does_not_depend_on_the_order_of_counting_and_adds_up(pairs, random):
    positions, numbers = (np.array(column) for column in zip(*pairs, strict=True))
    shuffled = list(range(len(pairs)))
    random.shuffle(shuffled)
    whole = delivered_digest(positions, numbers)
    assert whole == delivered_digest(positions[shuffled], numbers[shuffled])
    parts = delivered_digest(positions[:1], numbers[:1]) + delivered_digest(positions[1:], numbers[1:])
    assert whole == parts % 2**64


def test_a_digest_knows_which_sample_came_where():
    positions = np.arange(4)
    swapped = delivered_digest(positions, np.array([7, 5, 6, 8]))
    assert delivered_digest(positions, np.array([5, 7, 6, 8])) != swapped
    assert delivered_digest(positions + 1, np.array([7, 5, 6, 8])) != swapped
    assert delivered_digest(positions, np.array([7, 5, 6, 9])) != swapped


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_digests_of_many_micro_batches_leave_padding_out(real):
    fetched = [max(1, count) for count in real]
    positions = np.arange(sum(fetched))
    starts = np.cumsum([0, *fetched])
    expected = [
        delivered_digest(np.arange(start, start + count), ORDER.at(np.arange(start, start + count)))
        for start, count in zip(starts, real, strict=False)
    ]
    assert delivered_digests(positions, ORDER.at(positions), fetched, real) == expected


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=30))
def test_runs_hold_the_spans_that_were_added(spans):
    runs = Runs()
    for first, length in spans:
        runs.add(first, length)
    assert expanded(runs.rows).tolist() == [p for first, length in spans for p in range(first, first + length)]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 300))
def test_the_positions_of_a_rank_take_one_row_whatever_the_number_of_steps(micro_batch, accumulate, ranks, steps):
    runs = Runs()
    for step in range(steps):
        for index in range(accumulate):
            runs.add((step * ranks * accumulate + index) * micro_batch, micro_batch)
    assert len(runs.rows) == 1


def test_a_line_for_each_flush_says_which_steps_positions_and_samples(tmp_path: Path):
    log = SampleLog(tmp_path, attempt=1, data_rank=1)
    log.begin(0, **BEGIN)
    for step in range(5):
        noted(log, step, step * 8 + 4, 2)
        noted(log, step, step * 8 + 6, 2)
        if step == 2:
            log.flush()
    log.flush()
    log.flush()  # with nothing new
    header, one, two = read_lines(tmp_path / "samples" / "1-1.jsonl").records
    assert (header["begin"], header["data_rank"], header["specification"]) == (0, 1, "abc")
    assert (one["steps"], two["steps"]) == ([0, 3], [3, 5])
    assert one["positions"] == [[4, 4, 8, 3]]
    assert [chunk[:2] for chunk in one["chunks"]] == [[1, 4]] * 3
    positions = np.arange(12, 16)
    assert one["chunks"][1][2] == f"{delivered_digest(positions, ORDER.at(positions)):016x}"


def test_a_line_stays_small_however_many_steps_it_is_about(tmp_path: Path):
    log = SampleLog(tmp_path, attempt=1, data_rank=0)
    log.begin(0, **BEGIN)
    for step in range(1500):
        noted(log, step, step * 8, 4)
    log.flush()
    _, line = read_lines(log.path).records
    chunks = line["chunks"]
    assert len(chunks) <= MOST_CHUNKS
    assert sum(chunk[0] for chunk in chunks) == 1500
    assert log.path.stat().st_size < 2048
    positions = expanded(line["positions"])
    assert sum(int(chunk[2], 16) for chunk in chunks) % 2**64 == delivered_digest(positions, ORDER.at(positions))


def test_what_was_not_flushed_is_void(tmp_path: Path):
    log = SampleLog(tmp_path, attempt=1, data_rank=0)
    log.begin(0, **BEGIN)
    noted(log, 0, 0, 4)
    log.flush()
    noted(log, 1, 8, 4)
    log.begin(1, **BEGIN)  # back to the checkpoint of step 1
    noted(log, 1, 12, 4)
    log.flush()
    noted(log, 2, 16, 4)
    log.close()
    lines = read_lines(log.path).records
    assert [next(iter(line)) for line in lines] == ["begin", "steps", "begin", "steps"]
    assert (lines[-1]["steps"], lines[-1]["positions"]) == ([1, 2], [[12, 4, 0, 1]])


def test_positions_that_are_skipped_are_not_in_the_log(tmp_path: Path):
    skipped = ((6, 9), (12, 13))
    log = SampleLog(tmp_path, attempt=1, data_rank=0)
    log.begin(0, **{**BEGIN, "skipped": skipped})
    for step in range(3):
        positions = past_skipped(np.arange(step * 4, step * 4 + 4), skipped)
        log.note(step, int(positions[0]), 4, delivered_digest(positions, ORDER.at(positions)))
    log.flush()
    line = read_lines(log.path).records[1]
    assert expanded(line["positions"]).tolist() == past_skipped(np.arange(12), skipped).tolist()


def test_a_log_that_cannot_be_written_is_reported_and_caught_up(tmp_path: Path):
    problems: list[str] = []
    (tmp_path / "samples").write_text("in the way")
    log = SampleLog(tmp_path, 1, 0, problems.append)
    log.begin(0, **BEGIN)
    noted(log, 0, 0, 8)
    log.flush()
    assert any("samples" in problem for problem in problems)
    (tmp_path / "samples").unlink()
    noted(log, 1, 8, 8)
    log.flush()
    assert [record.get("steps") for record in read_lines(log.path).records] == [None, [0, 1], [1, 2]]


def test_a_step_without_a_real_sample_counts_as_a_step(tmp_path: Path):
    log = SampleLog(tmp_path, attempt=1, data_rank=1)
    log.begin(0, **BEGIN)
    noted(log, 0, 4, 4)
    log.note(1, 12, 0, 0)
    log.flush()
    line = read_lines(log.path).records[1]
    assert (line["steps"], line["positions"]) == ([0, 2], [[4, 4, 0, 1]])
    assert [chunk[1] for chunk in line["chunks"]] == [4, 0]


class Numbered(list[dict[str, int]]):
    """A dataset whose samples are their own numbers."""

    def __init__(self, length: int) -> None:
        super().__init__({"number": number} for number in range(length))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_says_what_it_delivered(workers: int):
    slices = Slices(batch=6, micro_batch=2, accumulate=1, data_rank=1, total_samples=21, skipped=((5, 9),))
    loader = Loader(Indexed(Numbered(10)), slices, torch.device("cpu"), torch.float32, seed=1, workers=workers)
    micros = list(loader.micro_batches(0, 4))
    for step, micro in enumerate(micros):
        (request,) = slices.of_step(step)
        positions = slices.positions(request)[: micro.samples]
        delivered = np.asarray(micro.inputs["number"])[: micro.samples]
        assert micro.numbers_digest == delivered_digest(positions, delivered)
    assert [micro.samples for micro in micros] == [2, 2, 2, 1]


def test_data_on_the_device_says_what_it_delivered():
    source = open_source("stdlib-text", {"limit": 20, "context": 8}, "train", 1)
    slices = Slices(batch=4, micro_batch=2, accumulate=2, data_rank=0, total_samples=14)
    loader = Loader(Indexed(source), slices, torch.device("cpu"), torch.float32, seed=1)
    requests = [request for step in range(4) for request in slices.of_step(step)]
    assert loader._columns is not None
    for request, micro in zip(requests, loader.micro_batches(0, 4), strict=True):
        positions = slices.positions(request)[: request[1]]
        assert micro.numbers_digest == delivered_digest(positions, Shuffled(1, len(source)).at(positions))
