"""How far a live run is, kept up to date from its files alone, so that local and remote runs look the same."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from gradus.record.append_log import LogTail
from gradus.record.directory import RunDirectory
from gradus.record.format import duration_text, metric_text, number_text, rate_text
from gradus.record.metrics import is_evaluation, position, validation_results
from gradus.record.status import read_status

_STEPS_FOR_ETA = 20
_SHOWN_METRICS = 3  # a line has room for the loss and a few more


class Progress:
    """The last training and evaluation records of a run, and the line that says what they mean."""

    def __init__(self, run: RunDirectory, steps_total: int | None) -> None:
        """`steps_total` may be left open: rank 0 writes it to the status once it has counted the data."""
        self.steps_total = steps_total
        self._run = run
        self._tail = LogTail(run.metrics_path)
        self._training: dict[str, Any] = {}
        self._evaluation: dict[str, Any] = {}
        self._epoch: Mapping[str, Any] = {}  # the last that ended
        self._step_seconds: deque[float] = deque(maxlen=_STEPS_FOR_ETA)

    @property
    def step(self) -> int:
        return int(self._training.get("step", 0))

    def poll(self) -> bool:
        """Read what is new; whether there was anything."""
        records = self._tail.poll()
        # Also when nothing is new: the status is written shortly after, and in a short run later than all records.
        counted = False
        if self.steps_total is None and (records or self._training):
            status = read_status(self._run)
            self.steps_total = status.steps_total if status else None
            counted = self.steps_total is not None
        for record in records:
            if "step" not in record:
                continue
            old = self._evaluation
            if old and not _same_attempt(old, record) and position(record) < position(old):
                self._evaluation = {}  # of work that a later attempt discarded
            if self._epoch and not _same_attempt(self._epoch, record) and record["step"] <= self._epoch["step"]:
                self._epoch = {}
            if record.get("epoch") is not None:
                self._epoch = record
            if is_evaluation(record):
                self._evaluation = _with_its_step(self._evaluation, record)
            else:
                # Hooks and own loops write lines of their own, also before the numbers of their step have arrived.
                further = "loss" in self._training and "loss" not in record and _same_attempt(self._training, record)
                if not further or self._training["step"] == record["step"]:
                    self._training = _with_its_step(self._training, record)
                if record.get("step_seconds"):
                    self._step_seconds.append(record["step_seconds"])
        return bool(records) or counted

    def line(self) -> str:
        """`step 120/200  loss 2.314  epoch 3 loss 2.41  validation loss 2.5, accuracy 41.2%  41 k tok/s  ETA 0:23`."""
        step, loss = self.step, self._training.get("loss")
        total = self.steps_total if self.steps_total is None or step <= self.steps_total else None  # of a budget cut
        parts = [f"step {step}" if total is None else f"step {step}/{total}"]
        if loss is not None:
            parts.append(f"loss {number_text(loss)}")
        if self._epoch.get("epoch_loss") is not None:
            parts.append(f"epoch {self._epoch['epoch']} loss {number_text(self._epoch['epoch_loss'])}")
        validation = list(validation_results(self._evaluation).items())
        if validation:
            shown = ", ".join(f"{name} {metric_text(name, value)}" for name, value in validation[: 1 + _SHOWN_METRICS])
            parts.append(f"validation {shown}")
        speed = speed_text(self._training.get("tokens_per_second"), self._training.get("samples_per_second"))
        if speed:
            parts.append(speed)
        if self.steps_total is not None and step < self.steps_total and self._step_seconds:
            left_seconds = (self.steps_total - step) * statistics.median(self._step_seconds)
            parts.append(f"ETA {duration_text(left_seconds)}")
        return "  ".join(parts)


def _same_attempt(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(one.get("attempt") == other.get("attempt"))


def _with_its_step(known: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The record, with what earlier lines said of the same step."""
    same = known.get("step") == record["step"] and _same_attempt(known, record)
    return {**known, **record} if same else dict(record)


def speed_text(tokens_per_second: float | None, samples_per_second: float | None) -> str | None:
    """Tokens where the model has them, samples where not."""
    if tokens_per_second:
        return rate_text(tokens_per_second, "tok")
    return rate_text(samples_per_second, "samples") if samples_per_second else None
