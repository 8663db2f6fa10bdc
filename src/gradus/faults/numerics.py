"""Numerics: a loss that is no longer a number ends the run with everything needed to look into it."""

from __future__ import annotations

from gradus.schema.errors import DoNotRestart

SHOWN_SAMPLES = 32


def not_a_number(
    *, what: str, value: float, step: int, positions: range, indices: list[int], saved_step: int | None
) -> DoNotRestart:
    """The error for step `step` (counted from 1). The same data and seed would give it again: do not restart."""
    shown = ", ".join(str(index) for index in indices[:SHOWN_SAMPLES])
    more = f", … ({len(indices) - SHOWN_SAMPLES} more)" if len(indices) > SHOWN_SAMPLES else ""
    last_good = step - 1
    kept = f"the newest checkpoint is of step {saved_step}" if saved_step is not None else "there is no checkpoint yet"
    return DoNotRestart(
        f"the {what} is {value} at step {step}; the last good step is {last_good}, and {kept}. "
        f"Samples of that step: positions {positions.start} to {positions.stop - 1} of the stream, "
        f"dataset indices {shown}{more}",
        hint="try a lower optimizer.lr, a longer optimizer.warmup or optimizer.clip=1.0; look at those samples",
        step=step,
        last_good_step=last_good,
        checkpoint_step=saved_step,
        positions=[positions.start, positions.stop - 1],
        sample_indices=indices,
    )
