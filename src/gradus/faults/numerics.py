"""Numerics: a loss that is no longer a number ends the run with everything needed to look into it."""

from __future__ import annotations

from gradus.schema.errors import DoNotRestart

SHOWN_SAMPLES = 32


def not_a_number(
    *,
    what: str,
    value: float,
    step: int,
    last_good_step: int,
    positions: range,
    indices: list[int],
    saved_step: int | None,
) -> DoNotRestart:
    """The error for step `step` (counted from 1). The same data and seed would give it again: do not restart."""
    shown = ", ".join(str(index) for index in indices[:SHOWN_SAMPLES])
    more = f", … ({len(indices) - SHOWN_SAMPLES} more)" if len(indices) > SHOWN_SAMPLES else ""
    kept = f"the newest checkpoint is of step {saved_step}" if saved_step is not None else "there is no checkpoint yet"
    return DoNotRestart(
        f"the {what} is {value} at step {step}; the last good step is {last_good_step}, and {kept}. "
        f"Samples of that step: positions {positions.start} to {positions.stop - 1} of the stream, "
        f"dataset indices {shown}{more}",
        hint="try a lower optimizer.lr, a longer optimizer.warmup or optimizer.clip=1.0; look at those samples",
        step=step,
        last_good_step=last_good_step,
        checkpoint_step=saved_step,
        positions=[positions.start, positions.stop - 1],
        sample_indices=indices,
    )


def always_overflows(*, step: int, skipped: int, scale: float) -> DoNotRestart:
    """The error for fp16 gradients that overflow however small the loss scale is."""
    return DoNotRestart(
        f"the fp16 gradients overflowed in {skipped} steps in a row up to step {step}, though the loss scale went down "
        f"to {scale:g}: that is no matter of scaling",
        hint="use plan.precision=bf16 or fp32; if it stays, try a lower optimizer.lr",
        step=step,
        scale=scale,
    )
