"""Profiling: torch's profiler on the steps and ranks that were asked for, and nothing of it on any other.

The profiler is prepared a step before the first one, which pays for what it has to set up. Then a mark is around each
step (`gradus:step`), and one around each phase in it (`gradus:data`, `gradus:forward`, ...). What was recorded goes
into the run's `traces/`, whole or not at all, also if the run ends earlier.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter, rank_writer
from gradus.schema.profile_request import PROFILE_FILE, ProfileRequest
from gradus.training.memory_snapshot import begin_history, write_snapshot

if TYPE_CHECKING:
    from gradus.training.live_run import LiveRun

_COMPRESSION = 3  # a third of the time of gzip's default, for a tenth more bytes
Tell = Callable[[dict[str, Any]], None]


class Profiling:
    """The recording of one rank's steps. The thread that trains calls `at` between steps, and `phase` inside them.

    Whatever goes wrong in it, in torch's profiler or on the disk, ends the recording and not the run.
    """

    def __init__(
        self,
        request: ProfileRequest,
        window: range,  # of steps, from 1
        traces: Path,
        *,
        attempt: int,
        rank: int,
        world_size: int,
        device: torch.device,
        tell: Tell,
        listen: Callable[[Callable[[str], None] | None], None] | None = None,  # who is to be told of phases, or nobody
    ) -> None:
        self._request, self._window, self._traces = request, window, traces
        self._attempt, self._rank, self._world_size = attempt, rank, world_size
        self._device, self._tell, self._listen = device, tell, listen
        self._profiler: Any = None
        self._recorded = 0  # steps, complete
        self._done = 0
        self._step_mark: Any = None
        self._phase_mark: Any = None
        self._thread = 0
        self._over = False

    def interrupts(self, done: int) -> bool:
        """Whether something is set up or written after so many steps, which takes longer than the time between two."""
        return not self._over and _interrupts(self._window, done)

    @property
    def recording(self) -> bool:
        return self._step_mark is not None

    def at(self, done: int) -> None:
        """So many steps are done; the next one begins."""
        if self._over:
            return
        went_back, self._done = done <= self._done, done
        with self._without_harm():
            if self.recording:
                self._end_marks()
                self._recorded += not went_back
                if done >= self._window[-1] or went_back:
                    self._finish()
                    return
                self._profiler.step()
                self._begin_step()
            elif done >= self._window[0] - 2:
                self._prepare(done)

    def phase(self, kind: str) -> None:
        """From now on the thread that trains is at something else."""
        if self._step_mark is None or threading.get_ident() != self._thread:  # gradients have threads of their own
            return
        with self._without_harm():
            self._end_phase()
            self._phase_mark = _begun(f"gradus:{kind}")

    def close(self) -> None:
        """The run ends. What was recorded until now is written."""
        if self._over:
            return
        with self._without_harm():
            if self.recording:
                self._end_marks()
                self._finish()
                return
            if self._profiler is not None:
                self._profiler.on_trace_ready = None
                self._profiler.stop()
            self._over = True
            first, last = self._window[0], self._window[-1]
            self._tell({"message": f"profile: the run ended before steps {first} to {last}: nothing was recorded"})

    @contextlib.contextmanager
    def _without_harm(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # torch's profiler raises what it likes
            self._over = True
            if self._listen is not None:
                self._listen(None)
            profiler, self._profiler, self._step_mark, self._phase_mark = self._profiler, None, None, None
            if profiler is not None:
                with contextlib.suppress(Exception):
                    profiler.stop()
            reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._tell({"rank": self._rank, "message": f"profile: nothing could be recorded: {reason}"})

    def _prepare(self, done: int) -> None:
        """Set up a step ahead; where there is none, at once."""
        if self._profiler is None:
            self._thread = threading.get_ident()
            self._profiler = _profiler(self._request, self._device, warm_up=done < self._window[0] - 1)
            if self._request.memory:
                begin_history(self._device)
            self._profiler.start()
        elif done == self._window[0] - 1:
            self._profiler.step()
        if done >= self._window[0] - 1:
            self._begin_step()

    def _begin_step(self) -> None:
        self._step_mark = _begun("gradus:step")
        if self._listen is not None:
            self._phase_mark = _begun("gradus:other")
            self._listen(self.phase)

    def _end_marks(self) -> None:
        self._end_phase()
        self._step_mark.__exit__(None, None, None)
        self._step_mark = None

    def _end_phase(self) -> None:
        mark, self._phase_mark = self._phase_mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def _finish(self) -> None:
        """Stop, write, tell."""
        if self._listen is not None:
            self._listen(None)
        first, last = self._window[0], self._window[0] + max(self._recorded, 1) - 1
        fields: dict[str, Any] = {"rank": self._rank, "first_step": first, "last_step": last}
        self._traces.mkdir(mode=0o700, exist_ok=True)
        if self._request.memory:
            fields |= write_snapshot(self._traces, self._attempt, self._rank, self._device)
        self._profiler.add_metadata_json("gradus", json.dumps(self._about(first, last)))
        self._profiler.stop()
        path = self._traces / f"attempt-{self._attempt}-rank-{self._rank}-steps-{first}-{last}.json.gz"
        _write(self._profiler, path)
        self._over, self._profiler = True, None
        missing = len(self._window) - self._recorded
        early = f" ({missing} fewer than asked for: the run ended)" if missing > 0 else ""
        self._tell(
            {**fields, "path": f"traces/{path.name}", "message": f"profile: steps {first} to {last}{early}: {path}"}
        )

    def _about(self, first: int, last: int) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "world_size": self._world_size,
            "attempt": self._attempt,
            "first_step": first,
            "last_step": last,
            "steps": last - first + 1,  # that are whole; after them, there may be a mark of one that never ended
            "paths": [os.path.abspath(path) for path in sys.path],  # torch cuts them off the names of files
        }


class Bystander:
    """A rank that records nothing while others do: it takes in its numbers where they do, since what these say, a step
    to go back to, must be found by all ranks at the same step."""

    def __init__(self, window: range) -> None:
        self._window = window
        self._done = 0
        self._others_record = self._over = False

    def interrupts(self, done: int) -> bool:
        return not self._over and _interrupts(self._window, done)

    def at(self, done: int) -> None:
        went_back, self._done = done <= self._done, done
        if self._others_record and (done >= self._window[-1] or went_back):
            self._over = True
        self._others_record = done >= self._window[0] - 1


def _interrupts(window: range, done: int) -> bool:
    return done in (window[0] - 2, window[0] - 1) or done >= window[-1]


def profiling_of(live: LiveRun) -> Profiling | Bystander | None:
    """The recording that the attempt asks of this rank, or of others, if it does."""
    request = requested(live.run, live.attempt)
    world = live.world
    if request is None:
        return None
    _own_steps_count()
    window = request.window(live.state.step, live.total_steps)
    if not request.wants(world.rank, world.size):
        return Bystander(window) if window is not None else None
    if window is None:
        first = request.first or live.state.step + 1
        live.recorder.event("profile", message=f"profile: steps from {first} on are none of this attempt's")
        return None

    def listen(to: Callable[[str], None] | None) -> None:
        live.watch.own.on_switch = to

    profiling = Profiling(
        request,
        window,
        live.run.path / "traces",
        attempt=live.attempt,
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        tell=_teller(live),
        listen=listen,
    )
    before = live.recorder.on_close

    def close() -> None:
        profiling.close()
        before()

    live.recorder.on_close = close
    return profiling


def requested(run: RunDirectory, attempt: int) -> ProfileRequest | None:
    """What the attempt's files ask for."""
    file = run.attempt_path(attempt) / PROFILE_FILE
    return ProfileRequest.from_json(file.read_text()) if file.exists() else None


def events_of(run: RunDirectory, attempt: int, rank: int) -> Tell:
    """Tells in a file of the rank's own."""

    def tell(fields: dict[str, Any]) -> None:
        writer = EventWriter(run, rank_writer(attempt, rank))
        writer.write("profile", attempt=attempt, **{"rank": rank, **fields})
        writer.close()

    return tell


def _teller(live: LiveRun) -> Tell:
    if not live.world.leads:
        return events_of(live.run, live.attempt, live.world.rank)
    return lambda fields: live.recorder.event("profile", **fields)


def _own_steps_count() -> None:
    """In a script with an own loop, the hook that counts a foreign script's steps gives way."""
    hook = sys.modules.get("gradus.training.script_profiling")
    if hook is not None:
        hook.give_way()


def _profiler(request: ProfileRequest, device: torch.device, *, warm_up: bool) -> Any:
    from torch.profiler import ProfilerAction, ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])

    def action(number: int) -> ProfilerAction:
        # All of it is one recording: `stop` ends it, and this object writes it.
        return ProfilerAction.WARMUP if warm_up and number == 0 else ProfilerAction.RECORD

    return profile(
        activities=activities,
        schedule=action,
        with_stack=request.stacks,
        profile_memory=request.memory and device.type != "cuda",
        acc_events=True,
    )


def _begun(name: str) -> Any:
    mark = torch.profiler.record_function(name)
    mark.__enter__()  # type: ignore[no-untyped-call]
    return mark


def _write(profiler: Any, path: Path) -> None:
    plain, packed = path.with_name(f".{path.stem}.part"), path.with_name(f".{path.name}.part")
    try:
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=_COMPRESSION) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        packed.replace(path)
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)
