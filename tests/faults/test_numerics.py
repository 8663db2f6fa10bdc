"""Numerics: the error for a loss that is not a number says where to look."""

from __future__ import annotations

import math

from gradus.faults.numerics import SHOWN_SAMPLES, not_a_number
from gradus.schema.errors import EXIT_DO_NOT_RESTART


def test_it_names_the_step_the_last_good_one_the_checkpoint_and_the_samples() -> None:
    error = not_a_number(
        what="loss",
        value=math.nan,
        step=8,
        last_good_step=7,
        positions=range(28, 32),
        indices=[5, 9, 2, 7],
        saved_step=6,
    )
    assert error.exit_code == EXIT_DO_NOT_RESTART
    assert error.message == (
        "the loss is nan at step 8; the last good step is 7, and the newest checkpoint is of step 6. "
        "Samples of that step: positions 28 to 31 of the stream, dataset indices 5, 9, 2, 7"
    )
    assert error.details["sample_indices"] == [5, 9, 2, 7]
    assert error.details["last_good_step"] == 7


def test_of_many_samples_a_few_are_shown_and_all_are_recorded() -> None:
    count = SHOWN_SAMPLES + 8
    error = not_a_number(
        what="loss",
        value=math.inf,
        step=1,
        last_good_step=0,
        positions=range(count),
        indices=list(range(count)),
        saved_step=None,
    )
    assert "(8 more)" in error.message
    assert "there is no checkpoint yet" in error.message
    assert len(error.details["sample_indices"]) == count
