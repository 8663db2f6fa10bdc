"""Numerics: a loss that is no longer a number, told with everything needed to look into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradus.schema.errors import DoNotRestart

SHOWN_SAMPLES = 32
# Chosen, not measured. One sample that cannot be computed gives one bad step; a few bad neighbours, a few. More than
# that at once, or one step in fifty over a long time, is not about single samples: the weights are on their way out.
MOST_SKIPPED_IN_A_ROW = 5
MOST_SKIPPED, SKIPS_WITHIN_STEPS = 20, 1000


@dataclass(frozen=True)
class StepData:
    """The samples of a step, or of several that follow each other."""

    positions: range  # of the stream
    indices: list[int]  # of the dataset, in the stream's order

    @property
    def text(self) -> str:
        shown = ", ".join(str(index) for index in self.indices[:SHOWN_SAMPLES])
        more = f", … ({len(self.indices) - SHOWN_SAMPLES} more)" if len(self.indices) > SHOWN_SAMPLES else ""
        last = self.positions.stop - 1
        return f"positions {self.positions.start} to {last} of the stream, dataset indices {shown}{more}"

    @property
    def fields(self) -> dict[str, list[int]]:
        """As events and errors have it."""
        return {"positions": [self.positions.start, self.positions.stop - 1], "sample_indices": self.indices}


def not_a_number(
    *,
    what: str,
    value: float,
    step: int,
    last_good_step: int,
    data: StepData,
    saved_step: int | None,
    own_loop: bool = False,
) -> DoNotRestart:
    """The error for step `step` (counted from 1). The same data and seed would give it again: do not restart.

    The recipe of an own loop is in its script, where there is no `--set`.
    """
    kept = f"the newest checkpoint is of step {saved_step}" if saved_step is not None else "there is no checkpoint yet"
    remedy = "try a lower optimizer.lr, a longer optimizer.warmup or optimizer.clip=1.0"
    if step == 1:
        named_by = _to_set("anomaly", "true", own_loop)
        remedy = (
            f"the weights were not updated yet, so it is not optimizer.lr: {named_by} names the operation whose "
            "gradient is no number; look for a log of 0 or a division by 0"
        )
    return DoNotRestart(
        f"the {what} is {value} at step {step}; the last good step is {last_good_step}, and {kept}. "
        f"Samples of that step: {data.text}",
        hint=f"{remedy}; look at those samples; to go on without them: "
        f"{_to_set('data.skip', f'[[{data.positions.start}, {data.positions.stop}]]', own_loop)}; "
        f"to have that done by itself: {'on_nan: skip' if own_loop else 'on_nan=skip or on_nan=rollback'}",
        step=step,
        last_good_step=last_good_step,
        checkpoint_step=saved_step,
        **data.fields,
    )


def _to_set(key: str, value: str, own_loop: bool) -> str:
    """What to do to give a key of the recipe a value."""
    if not own_loop:
        return f"--set {key}={value}" if value.isalnum() else f"--set '{key}={value}'"
    block, _, last = key.rpartition(".")
    return f"{block}: {{{last}: {value}}} in the recipe" if block else f"{key}: {value} in the recipe"


def too_many_skipped(steps: Sequence[int], data: StepData) -> DoNotRestart | None:
    """The error for a run that skips (`on_nan: skip`) too often; `steps` are those it skipped, the last one now."""
    last = [step + 1 for step in steps]  # people count from 1
    row = last[-(MOST_SKIPPED_IN_A_ROW + 1) :]
    in_a_row = len(row) > MOST_SKIPPED_IN_A_ROW and row[-1] - row[0] == MOST_SKIPPED_IN_A_ROW
    lately = [step for step in last if step > last[-1] - SKIPS_WITHIN_STEPS]
    if in_a_row:
        told = f"{len(row)} steps in a row, {row[0]} to {row[-1]}"
    elif len(lately) > MOST_SKIPPED:
        told = f"{len(lately)} of the last {SKIPS_WITHIN_STEPS} steps, the last of them {lately[-1]}"
    else:
        return None
    return DoNotRestart(
        f"the loss or a gradient was no number in {told}. All of them were skipped, but that many are no matter of "
        f"single samples. Samples of the last: {data.text}",
        hint="try a lower optimizer.lr, a longer optimizer.warmup or optimizer.clip=1.0, and go on from an earlier "
        "checkpoint; look at the skipped-step events for the samples of the others",
        step=last[-1],
        skipped_steps=lately,
        **data.fields,
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
