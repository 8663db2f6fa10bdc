"""Recorder: what rank 0 writes down while a run is alive; on other ranks it does nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradus.parallel.world import World
from gradus.record.append_log import AppendLog
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter, rank_writer
from gradus.record.status import Heartbeat, Status
from gradus.training.breakdown import Timings, metrics_of, peak_memory_bytes
from gradus.training.epochs import Epoch
from gradus.training.readback import StepNumbers


@dataclass(frozen=True)
class Rates:
    """What turns seconds into throughput."""

    tokens_per_sample: int | None = None
    flops_per_sample: float | None = None
    peak_flops: float | None = None  # of all ranks together, in the precision of the run
    peak_source: str | None = None  # where that number comes from

    def mfu(self) -> dict[str, Any]:
        """What MFU is computed from; nothing where a part of it is not known."""
        if self.flops_per_sample is None or self.peak_flops is None:
            return {}
        return {
            "flops_per_sample": self.flops_per_sample,
            "peak_flops": self.peak_flops,
            "peak_source": self.peak_source,
        }

    def per_second(self, seconds: float, samples: float) -> dict[str, float | None]:
        rate = samples / seconds if seconds > 0 else None
        tokens = rate * self.tokens_per_sample if rate is not None and self.tokens_per_sample else None
        known = rate is not None and self.flops_per_sample is not None and self.peak_flops is not None
        mfu = rate * self.flops_per_sample / self.peak_flops if known else None  # type: ignore[operator]
        return {"samples_per_second": rate, "tokens_per_second": tokens, "mfu": mfu}


class Recorder:
    def __init__(self, run: RunDirectory, attempt: int, world: World, log_every: int) -> None:
        self._run, self._attempt, self._rank = run, attempt, world.rank
        self._device = world.device
        self.rates = Rates()  # known once the model is built
        self.timings: Timings | None = None  # where the time of steps goes, on every rank
        self._log_every = log_every
        self._steps = self._samples = 0
        self._seconds = self._data_seconds = 0.0
        self._last_done = time.monotonic()
        self.problems: list[str] = []
        self._open = True
        self.on_start: Callable[[], None] = lambda: None  # of the clock
        self.on_restart: Callable[[], None] = lambda: None
        self.on_close: Callable[[], None] = lambda: None
        self._files: tuple[AppendLog, EventWriter, Heartbeat] | None = None
        self._own_events: EventWriter | None = None  # of a rank that has no other files, once it has something to tell
        if world.leads:
            events = EventWriter(run, rank_writer(attempt), self.report)
            heartbeat = Heartbeat(run, Status(state="running", attempt=attempt), self.report)
            self._files = (AppendLog(run.metrics_path, partial(self.problem, "write-error")), events, heartbeat)

    def logs(self, step: int) -> bool:
        """Whether the step with this number (from 1) is one whose numbers are written down."""
        return step % self._log_every == 0 or step == 1

    def event(self, event: str, **fields: Any) -> None:
        if self._files:
            self._files[1].write(event, attempt=self._attempt, **fields)

    def status(self, **changes: Any) -> None:
        if self._files:
            self._files[2].update(**changes)

    def restart_clock(self) -> None:
        """After work that is no part of a step (evaluation, saving), so that it does not count as step time."""
        now = time.monotonic()
        if self.timings is not None:
            self.timings.between_steps(now - self._last_done)
        self._last_done = now
        self.on_restart()

    def start_clock(self) -> None:
        """The first step begins here, or the one from which a run that went back goes on."""
        self._last_done = time.monotonic()
        self.on_start()

    def step(
        self, step: int, consumed: int, samples: int, lr: float, data_seconds: float, numbers: StepNumbers
    ) -> float:
        """The numbers of a step have arrived (one step late); `consumed` samples in all, `samples` of them in it.

        Returns the seconds that the step took.
        """
        seconds = numbers.done_at - self._last_done
        self._steps += 1
        self._samples += samples
        self._seconds += seconds
        self._data_seconds += data_seconds
        self._last_done = numbers.done_at
        mean = self.timings.step(step, seconds, log=self.logs(step)) if self.timings is not None else None
        if not self._files or not self.logs(step):
            return seconds
        tokens = self.rates.tokens_per_sample
        record = {
            "step": step,
            "attempt": self._attempt,
            "samples": consumed,
            "tokens": consumed * tokens if tokens else None,
            "loss": None if numbers.not_finite else numbers.loss,
            "lr": lr,
            "grad_norm": numbers.grad_norm,
            "step_seconds": self._seconds / self._steps,
            "data_seconds": self._data_seconds / self._steps,
            **self.rates.per_second(self._seconds, self._samples),
            "memory_peak_bytes": peak_memory_bytes(self._device),
        }
        if mean is not None:
            record.update(metrics_of(mean))
        if numbers.scale_after is not None:
            record["loss_scale"] = numbers.scale_after
        record.update(numbers.experts)
        self._files[0].write(record)
        self._files[2].update(step=step)
        self._steps, self._samples, self._seconds, self._data_seconds = 0, 0, 0.0, 0.0
        return seconds

    def rolled_back(self, to_step: int) -> None:
        """What was written down of later steps is no part of the run any more."""
        self._steps, self._samples, self._seconds, self._data_seconds = 0, 0, 0.0, 0.0
        if self.timings is not None:
            self.timings.forget()
        if self._files:
            self._files[0].write({"rolled_back_to": to_step, "attempt": self._attempt})
            self._files[2].update(step=to_step)

    def epoch(self, step: int, epoch: Epoch) -> None:
        """A pass over the dataset ended with this step."""
        if self._files:
            rates = self.rates.per_second(epoch.seconds, epoch.samples)
            numbers = {
                "epoch": epoch.number,
                "epoch_loss": epoch.loss,
                "epoch_samples_per_second": rates["samples_per_second"],
                "epoch_tokens_per_second": rates["tokens_per_second"],
            }
            self._files[0].write({"step": step, "attempt": self._attempt, **numbers})

    def evaluation(self, step: int, results: dict[str, float], seconds: float) -> None:
        if self._files:
            named = {f"validation_{name}": value for name, value in results.items()}
            self._files[0].write({"step": step, "attempt": self._attempt, **named, "evaluation_seconds": seconds})

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Further numbers of a step, in a line of their own; readers put them into the row of that step."""
        if self._files:
            plain = {name: float(value) for name, value in numbers.items()}
            self._files[0].write({"step": step, "attempt": self._attempt, **plain})

    @contextmanager
    def told_of_failure(self) -> Iterator[None]:
        """If what is done inside fails, so has the run."""
        try:
            yield
        except BaseException as error:
            self.close(state="failed", last_error=str(error) or type(error).__name__)
            raise

    def close(self, **final_status: Any) -> list[str]:
        """Write what is still waiting, and the last status. Returns what could not be written."""
        self._open = False
        self.on_close()
        lost = self.timings.close() if self.timings is not None else []
        self.timings = None
        if not self._files:
            return lost + (self._own_events.close() if self._own_events is not None else [])
        metrics, events, heartbeat = self._files
        lost += [*metrics.close(), *events.close()]
        problem = heartbeat.close(**final_status)
        self._files = None
        return lost + ([problem] if problem else [])

    def problem(self, kind: str, message: str) -> None:
        """Something that could not be written: training goes on, and everybody is told, whichever rank it is."""
        self.report(message)
        if self._files or not self._open:
            self.event("fault", kind=kind, message=message)
            return
        if self._own_events is None:
            self._own_events = EventWriter(self._run, rank_writer(self._attempt, self._rank), self.report)
        self._own_events.write("fault", attempt=self._attempt, rank=self._rank, kind=kind, message=message)

    def report(self, message: str) -> None:
        """Say that something could not be written; for what writes by itself."""
        with suppress(OSError):  # the log may be on the disk that is full
            print(f"gradus: {message}", flush=True)
        self.problems.append(message)
