"""Numerics: the error for a loss that is not a number says where to look, and when skipping has to end."""

from __future__ import annotations

import math

import pytest

from gradus.faults.numerics import (
    MOST_SKIPPED,
    MOST_SKIPPED_IN_A_ROW,
    SHOWN_SAMPLES,
    SKIPS_WITHIN_STEPS,
    StepData,
    not_a_number,
    too_many_skipped,
)
from gradus.schema.errors import EXIT_DO_NOT_RESTART

DATA = StepData(range(28, 32), [5, 9, 2, 7])


def test_it_names_the_step_the_last_good_one_the_checkpoint_and_the_samples() -> None:
    error = not_a_number(what="loss", value=math.nan, step=8, last_good_step=7, data=DATA, saved_step=6)
    assert error.exit_code == EXIT_DO_NOT_RESTART
    assert error.message == (
        "the loss is nan at step 8; the last good step is 7, and the newest checkpoint is of step 6. "
        "Samples of that step: positions 28 to 31 of the stream, dataset indices 5, 9, 2, 7"
    )
    assert error.details["sample_indices"] == [5, 9, 2, 7]
    assert error.details["positions"] == [28, 31]
    assert error.details["last_good_step"] == 7


def test_of_many_samples_a_few_are_shown_and_all_are_recorded() -> None:
    count = SHOWN_SAMPLES + 8
    data = StepData(range(count), list(range(count)))
    error = not_a_number(what="loss", value=math.inf, step=1, last_good_step=0, data=data, saved_step=None)
    assert "(8 more)" in error.message
    assert "there is no checkpoint yet" in error.message
    assert len(error.details["sample_indices"]) == count


def test_before_the_first_update_the_learning_rate_is_not_blamed() -> None:
    hints = [
        str(
            not_a_number(
                what="loss", value=math.inf, step=step, last_good_step=step - 1, data=DATA, saved_step=None
            ).hint
        )
        for step in (1, 2)
    ]
    assert "--set anomaly=true" in hints[0]
    assert "try a lower optimizer.lr" not in hints[0]
    assert "try a lower optimizer.lr" in hints[1]


def test_an_own_loop_has_its_recipe_in_the_script_and_no_set() -> None:
    hints = [
        not_a_number(what="loss", value=1, step=step, last_good_step=0, data=DATA, saved_step=None, own_loop=True).hint
        for step in (1, 2)
    ]
    assert "--set" not in str(hints)
    assert "rollback" not in str(hints)
    assert "anomaly: true in the recipe names" in str(hints[0])
    assert "to go on without them: data: {skip: [[28, 32]]} in the recipe; " in str(hints[1])


SEVERAL = list(range(10, 10 + MOST_SKIPPED_IN_A_ROW))  # that follow each other
SCATTERED = list(range(0, 40 * MOST_SKIPPED, 40))


@pytest.mark.parametrize(
    ("skipped", "told"),
    [
        ([3], None),
        (SEVERAL, None),
        ([*SEVERAL, SEVERAL[-1] + 1], "6 steps in a row, 11 to 16"),
        ([*SEVERAL, SEVERAL[-1] + 2], None),
        (SCATTERED, None),
        ([*SCATTERED, SCATTERED[-1] + 40], f"21 of the last {SKIPS_WITHIN_STEPS} steps, the last of them 801"),
        ([*SCATTERED, SKIPS_WITHIN_STEPS], None),  # the first is too long ago
    ],
)
def test_a_few_skipped_steps_are_about_samples_and_many_are_not(skipped: list[int], told: str | None) -> None:
    error = too_many_skipped(skipped, DATA)
    assert (error is None) == (told is None)
    if error is not None and told is not None:
        assert told in error.message
        assert error.exit_code == EXIT_DO_NOT_RESTART
