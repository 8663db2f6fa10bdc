"""Tried: a recipe with a plan, trained for a few steps in processes of its own: how fast it is, and what it needs.

The processes stay from trial to trial, since starting torch takes longer than a few steps. One that runs out of memory,
fails or takes too long costs its trial and nothing else. Nothing is left on disk.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from gradus.hardware.detect import detect_machine
from gradus.hardware.host import available_memory
from gradus.launcher.torchrun import LOOPBACK, free_port, rank_environment
from gradus.record.directory import RunDirectory
from gradus.schema.errors import GradusError
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe

_RANK_MODULE = "gradus.bench.tried_rank"
_START_SECONDS = 300.0  # torch on a slow network file system
_PEERS_SECONDS = 5.0  # that ranks get to say the same, once one has failed
_START_TRIES = 3
_LAST_WORDS = 8
_SHARE_OF_HOST_MEMORY = 0.8
_LEAST_WINDOW = 4
_AUTO_WORKERS = 8  # that each rank may choose for itself

State = Literal["measured", "out-of-memory", "refused", "failed", "too-slow"]


@dataclass(frozen=True)
class Trial:
    """What to try, and for how long."""

    recipe: Recipe
    plan: Plan
    steps: int = 200  # timed ones at most
    warm_up: int = 3  # steps in which kernels are chosen or compiled, and the allocator finds its size
    seconds: float = 5.0  # of timed steps: enough, unless `whole`
    whole: bool = False  # all steps, whatever they take: what is compared is the loss
    evaluate: bool = False  # on the validation data, at the end
    limit_seconds: float = 300.0  # of the whole trial, building included
    host_memory_bytes: int | None = None  # that a rank on a CPU may take, as if there were no more

    def changed(self, **changes: Any) -> Trial:
        return Trial(**{**self._fields(), **changes})

    def with_plan(self, **changes: Any) -> Trial:
        return self.changed(plan=self.plan.model_copy(update=changes))

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def window(self) -> int:
        """Steps that are timed together. With workers, several batches are ready at once, and then none for a while."""
        workers = self.plan.workers if isinstance(self.plan.workers, int) else _AUTO_WORKERS
        return max(_LEAST_WINDOW, 2 * workers) if workers else 1

    @property
    def untimed(self) -> int:
        """First steps that do not count: the warm-up, and a window in which what was fetched ahead is used up."""
        return self.warm_up + (0 if self.whole else self.window)

    @property
    def shortened(self) -> Recipe:
        """The recipe for as many steps, without what costs time and tells nothing about a step."""
        budget = {"steps": self.untimed + self.steps, "epochs": None, "tokens": None}
        evaluate = self.recipe.evaluate.model_copy(update={"every": None, "target": None, "stop_after": None})
        rest = {"hooks": [], "exporters": [], "plan": self.plan, "evaluate": evaluate}
        return self.recipe.model_copy(update={**budget, **rest})

    def document(self) -> dict[str, Any]:
        """For the ranks. A budget that is left out is not there, not null."""
        recipe = self.shortened.model_dump(mode="json", exclude_unset=True, exclude={"plan"})
        return {
            "recipe": {key: value for key, value in recipe.items() if value is not None},
            "plan": self.plan.model_dump(mode="json"),
            **{key: value for key, value in self._fields().items() if key not in ("recipe", "plan")},
            "window": self.window,
        }


@dataclass(frozen=True)
class Tried:
    """How a trial went. Numbers are there only if it was measured."""

    state: State
    why: str = ""
    batch: int = 0
    step_seconds: tuple[float, ...] = ()  # the mean of each window of steps
    data_seconds: float | None = None  # of a step, waiting for samples
    memory_bytes: int | None = None  # of the rank that needs most
    losses: tuple[float, ...] = ()  # of all steps, warm-up included
    evaluation: dict[str, float] = field(default_factory=dict)
    device: str = ""
    seconds: float = 0.0  # that the trial took, everything included

    @property
    def measured(self) -> bool:
        return self.state == "measured"

    @property
    def seconds_per_step(self) -> float:
        """The median: a window in which something else was in the way is one window."""
        return statistics.median(self.step_seconds)

    @property
    def samples_per_second(self) -> float | None:
        return self.batch / self.seconds_per_step if self.step_seconds else None

    @property
    def data_share(self) -> float | None:
        if not self.step_seconds or self.data_seconds is None:
            return None
        return self.data_seconds / statistics.fmean(self.step_seconds)

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "samples_per_second": self.samples_per_second}


@dataclass(frozen=True)
class Repeated:
    """The same trial several times, with others in between."""

    tries: tuple[Tried, ...]

    @property
    def failure(self) -> Tried | None:
        return next((tried for tried in self.tries if not tried.measured), None)

    @property
    def measured(self) -> bool:
        return self.failure is None and bool(self.tries)

    @property
    def rates(self) -> list[float]:
        return [tried.samples_per_second for tried in self.tries if tried.samples_per_second is not None]

    @property
    def samples_per_second(self) -> float | None:
        return statistics.median(self.rates) if self.measured else None

    @property
    def spread(self) -> float:
        """Half of the range of the rates, as a share of their median; at least what each trial alone lets expect."""
        rates = self.rates
        between = (max(rates) - min(rates)) / 2 / statistics.median(rates) if len(rates) > 1 else 0.0
        return max([between, *(_uncertainty(tried.step_seconds) for tried in self.tries)])

    @property
    def memory_bytes(self) -> int | None:
        """The median: a first trial in a process pays for what stays loaded."""
        found = [tried.memory_bytes for tried in self.tries if tried.memory_bytes is not None]
        return round(statistics.median(found)) if self.measured and found else None

    @property
    def losses(self) -> tuple[float, ...]:
        return self.tries[0].losses if self.measured else ()


def _uncertainty(seconds: Sequence[float]) -> float:
    """Of a median, as a share of it: from the quartiles, so that a few that waited do not count."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle / math.sqrt(len(seconds)) if middle else 0.0


class Ranks:
    """Processes that try one thing after another. Started when there is something to try, and again after a failure."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[subprocess.Popen[str]] = []
        self._errors: list[IO[str]] = []
        self._number = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks that are there now."""
        return [process.pid for process in self._processes]

    def try_out(self, trial: Trial) -> Tried:
        """Train for a few steps. Whatever happens there, this returns; only Ctrl-C goes on up."""
        began = time.monotonic()
        assert trial.plan.mesh.world_size == self.count, (trial.plan.mesh, self.count)
        try:
            with tempfile.TemporaryDirectory(prefix="gradus-tried-") as folder:
                found = self._tried(trial, Path(folder))
        except GradusError as error:
            self.close()
            found = Tried("failed", error.message)
        except BaseException:
            self.close()  # ranks that nobody waits for must not go on
            raise
        return Tried(**{**asdict(found), "batch": trial.recipe.batch, "seconds": time.monotonic() - began})

    def _tried(self, trial: Trial, folder: Path) -> Tried:
        self._start(trial.recipe)
        run = RunDirectory.create(folder, "tried")
        self._number += 1
        asked = json.dumps({**trial.document(), "run": str(run.path), "number": self._number})
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has died, which is seen below
                process.stdin.write(asked + "\n")
                process.stdin.flush()
        answers = self._answers(time.monotonic() + trial.limit_seconds)
        found = _summed_up(answers, self, trial)
        if not found.measured and (self.count > 1 or any(not a.get("reusable") for a in answers.values())):
            self.close()  # the others may be stuck in a collective with the one that failed
        elif len(answers) < self.count or any(not a["reusable"] for a in answers.values()):
            self.close()
        return found

    def _answers(self, until: float) -> dict[int, dict[str, Any]]:
        """What each rank says. Incomplete if one failed, died, or the time is over."""
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            waiting = set(range(self.count))
            while waiting and time.monotonic() < until:
                for key, _ in selector.select(max(0.0, until - time.monotonic())):
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    rank = key.data
                    waiting.discard(rank)
                    selector.unregister(key.fileobj)
                    if line:
                        answers[rank] = json.loads(line)
                    if not line or answers[rank].get("state", "measured") != "measured":
                        until = min(until, time.monotonic() + _PEERS_SECONDS)
        return answers

    def _start(self, recipe: Recipe) -> None:
        if self._processes and all(process.poll() is None for process in self._processes):
            return
        for last in (False,) * (_START_TRIES - 1) + (True,):  # another process may take the port meanwhile
            self.close()
            self._spawn(recipe)
            ready = self._answers(time.monotonic() + _START_SECONDS)
            if len(ready) == self.count:
                return
            if last:
                raise GradusError(f"ranks for a trial could not be started: {self.last_words()}")

    def _spawn(self, recipe: Recipe) -> None:
        machine = detect_machine()
        variables = rank_environment(self.count, machine.cpu_cores, recipe)
        for name in [name for name in variables if name.startswith("TORCHELASTIC_")]:
            del variables[name]
        meeting = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(self.count)}
        for rank in range(self.count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.count)}
            self._errors.append(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", _RANK_MODULE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors[-1],
                    text=True,
                    env={**variables, **meeting, **own},
                    start_new_session=True,  # the terminal's Ctrl-C is for this process alone
                )
            )

    def death(self) -> tuple[int, int] | None:
        """A rank that is gone, and its exit code; one that was killed says more than those that lost it."""
        gone = [(rank, process.poll()) for rank, process in enumerate(self._processes)]
        dead = sorted((code, rank) for rank, code in gone if code is not None)
        return (dead[0][1], dead[0][0]) if dead else None

    def last_words(self, rank: int = 0) -> str:
        """The end of what a rank wrote to its stderr."""
        if rank >= len(self._errors):
            return ""
        file = self._errors[rank]
        file.seek(0)
        lines = [line.strip() for line in file.read().splitlines() if line.strip()]
        return " / ".join(lines[-_LAST_WORDS:])

    def close(self) -> None:
        """End the processes, and whatever they have started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: loader workers go with it
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        for file in self._errors:
            file.close()
        self._processes, self._errors = [], []


def interleaved(
    ranks: Ranks | Mapping[int, Ranks], trials: Mapping[str, Trial], repeats: int
) -> Iterator[tuple[str, Tried]]:
    """Each trial so often, in turns: what changes on the machine meanwhile changes for all. One that fails is left out.

    `ranks` may be several, by their number.
    """
    failed: set[str] = set()
    for turn in range(repeats):
        names = list(trials) if turn % 2 == 0 else list(trials)[::-1]
        for name in names:
            if name in failed:
                continue
            trial = trials[name]
            tried = (ranks if isinstance(ranks, Ranks) else ranks[trial.plan.mesh.world_size]).try_out(trial)
            if not tried.measured:
                failed.add(name)
            yield name, tried


def repeated(found: list[tuple[str, Tried]]) -> dict[str, Repeated]:
    """By name, in the order in which they came."""
    names = dict.fromkeys(name for name, _ in found)
    return {name: Repeated(tuple(tried for other, tried in found if other == name)) for name in names}


def noise_between(one: Repeated, other: Repeated, least: float = 0.02) -> float:
    """By how much two rates may differ and mean nothing."""
    return max(least, one.spread + other.spread)


def memory_notes(device: str) -> tuple[str, ...]:
    """What a reader must know of the memory that was measured."""
    if device != "cpu":
        return ()
    return ("memory is what the process on the CPU grew by: a few MiB more or less mean nothing",)


def host_memory_for(ranks: int) -> int | None:
    """What a rank on a CPU may take, so that a trial cannot take the machine down."""
    left = available_memory()
    return round(left * _SHARE_OF_HOST_MEMORY / ranks) if left is not None else None


def _summed_up(answers: dict[int, dict[str, Any]], ranks: Ranks, trial: Trial) -> Tried:
    """One result for all ranks: the first that failed tells why."""
    for state in ("out-of-memory", "refused", "failed"):  # a rank that lost its peer tells less than the peer
        for rank, answer in sorted(answers.items()):
            if answer["state"] == state:
                where = f"rank {rank}: " if ranks.count > 1 and state != "refused" else ""
                return Tried(state, f"{where}{answer['why']}")
    if len(answers) < ranks.count:
        time.sleep(0.2)  # its pipe closes before it is gone
        death = ranks.death()
        if death is None:
            return Tried("too-slow", f"it was not done after {trial.limit_seconds:.0f} s")
        rank, code = death
        if code == -signal.SIGKILL:
            return Tried("out-of-memory", f"rank {rank} was killed, as the kernel does when host memory runs out")
        return Tried("failed", f"rank {rank} left with exit code {code}: {ranks.last_words(rank)}")
    first = answers[0]
    # A window is over when the slowest rank has finished it.
    times = [answer["step_seconds"] for answer in answers.values()]
    memory = [answer["memory_bytes"] for answer in answers.values() if answer["memory_bytes"] is not None]
    return Tried(
        "measured",
        step_seconds=tuple(map(max, zip(*times, strict=True))),
        data_seconds=max(answer["data_seconds"] for answer in answers.values()),
        memory_bytes=max(memory, default=None),
        losses=tuple(first["losses"]),
        evaluation=first["evaluation"],
        device=first["device"],
    )
