"""A job that ends is a stop request, early enough to save."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from gradus.faults.deadline import Deadline, deadline_of, too_short
from gradus.faults.stop_request import StopRequest
from gradus.parallel.world import alone


def test_the_earliest_end_in_the_environment_counts() -> None:
    assert deadline_of({}) is None
    assert deadline_of({"SLURM_JOB_END_TIME": "2000"}) == Deadline(2000.0)
    assert deadline_of({"SLURM_JOB_END_TIME": "2000", "GRADUS_DEADLINE": "1500.5"}) == Deadline(1500.5)
    assert deadline_of({"SLURM_JOB_END_TIME": "UNLIMITED"}) is None, "what is no time is no end"


@pytest.mark.parametrize(("left", "lead", "stops"), [(100.0, 30.0, False), (29.0, 30.0, True), (-5.0, 0.0, True)])
def test_a_run_stops_as_long_before_the_end_as_saving_takes(
    tmp_path: Path, left: float, lead: float, stops: bool
) -> None:
    deadline = Deadline(time.time() + left, lead)
    request = StopRequest(tmp_path / "stop", alone(torch.device("cpu")), 0.0, deadline)
    assert request.seen() is stops
    if stops:
        assert request.reason is not None
        assert "the job ends at" in request.reason
    assert request.by_deadline is stops


def test_a_limit_that_is_too_short_for_a_step_says_what_it_was_and_is_not_tried_again() -> None:
    error = too_short(Deadline(time.time() + 8.0, 11.0), step=0)
    assert error.exit_code == 93
    assert "8 s when it started" in error.message
    assert "stopping and saving may take 11 s" in error.message
    assert error.hint is not None
    assert "--time" in error.hint
