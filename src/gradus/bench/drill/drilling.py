"""A fire drill: something bad is done to a live run or to a test run, and what comes of it is reported."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from gradus.bench.drill.injections import Injected, Target, inject, reached
from gradus.bench.drill.recovery import Recovery, observe
from gradus.checkpoint.manifest import committed_steps
from gradus.launcher.slurm.queue import submissions
from gradus.launcher.slurm.stopping import cancel
from gradus.launcher.verdict import DRILL_IS_OVER
from gradus.record.directory import RunDirectory
from gradus.record.status import read_status, shown_state
from gradus.record.stop import request_stop
from gradus.schema.errors import EXIT_BAD_INPUT, GradusError, InputError

_SAVES_EVERY = 5  # steps of a test run
_NAN_AFTER = 12
_HANGS_AFTER = "20s"  # in a test run: nobody wants to wait for minutes
_BEGIN_SECONDS = 900.0  # a job may wait in the queue
_END_SECONDS = 120.0
_LOOK_EVERY_SECONDS = 0.3


@dataclass(frozen=True)
class Drilled:
    run: RunDirectory
    injected: Injected
    recovery: Recovery

    def document(self) -> dict[str, Any]:
        injected = self.injected
        done = {"inject": injected.kind, "what": injected.what, "at_step": injected.step, "attempt": injected.attempt}
        return {"run": str(self.run.path), **done, **self.recovery.document()}


def drill_run(
    run: RunDirectory, kind: str, *, rank: int | None, patience_seconds: float, say: Callable[[str], None]
) -> Drilled:
    """Do it to a run that is alive."""
    jobs = submissions(run)
    target = Target(run, jobs[-1].job_id if jobs else None, rank)
    injected = inject(kind, target)
    say(f"{injected.what}, at step {injected.step}")
    return Drilled(run, injected, observe(run, injected, patience_seconds, say))


def drill_recipe(
    recipe: str,
    kind: str,
    *,
    rank: int | None,
    launch: Sequence[str],
    patience_seconds: float,
    say: Callable[[str], None],
) -> Drilled:
    """Start a test run of a recipe, do it to that, and stop it again. `launch` is the command line that starts it.

    It saves every few steps, so that there is something to go back to soon.
    """
    with tempfile.TemporaryDirectory(prefix="gradus-drill-") as folder:
        overrides = [f"checkpoint.every={_SAVES_EVERY}", "log_every=1", f"watchdog.at_least={_HANGS_AFTER}"]
        if kind == "nan":
            mark = Path(folder) / "nan"
            hook = {
                "use": "gradus.bench.drill.hooks:PutNan",
                "after_step": _NAN_AFTER,
                "rank": rank or 0,
                "mark": str(mark),
            }
            overrides.append(f"hooks={json.dumps([hook])}")
        settings = [word for override in overrides for word in ("--set", override)]
        with _test_run([*launch[:1], recipe, *settings, *launch[1:]], say) as run:
            needed = 2 if kind == "corrupt-checkpoint" else 1
            if kind == "nan":
                _until(run, lambda: reached(run) >= _NAN_AFTER, "it made no step")
                injected = Injected(kind, f"a weight became NaN after step {_NAN_AFTER}", time.time(), _NAN_AFTER, 1)
                return Drilled(run, injected, observe(run, injected, patience_seconds, say))
            _until(run, lambda: len(committed_steps(run.checkpoints)) >= needed, "it saved no checkpoint")
            return drill_run(run, kind, rank=rank, patience_seconds=patience_seconds, say=say)


@contextlib.contextmanager
def _test_run(arguments: Sequence[str], say: Callable[[str], None]) -> Iterator[RunDirectory]:
    """A run of its own, ended when the drill is."""
    runs, run_id = Path(arguments[arguments.index("--runs") + 1]), f"drill-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [sys.executable, "-m", "gradus", *arguments, "--run-id", run_id, "--json"]
    with tempfile.TemporaryFile("w+") as said:  # not a pipe: nobody would read it, and a full one stops the run
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            run = _found(process, said, runs, run_id)
            say(f"test run {run.path}")
            try:
                yield run
            finally:
                _end(run, is_job=arguments[0] == "submit")
        finally:
            try:
                process.wait(timeout=_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _end(run: RunDirectory, *, is_job: bool) -> None:
    if is_job:
        with contextlib.suppress(GradusError):  # it may have left the queue by itself
            cancel(run, by=DRILL_IS_OVER)  # saved, if it can be: one that recovered is not to look as if it had failed
    else:
        request_stop(run, DRILL_IS_OVER)


def _found(process: subprocess.Popen[bytes], said: TextIO, runs: Path, run_id: str) -> RunDirectory:
    give_up_at = time.monotonic() + _BEGIN_SECONDS
    while time.monotonic() < give_up_at:
        for path in runs.glob(f"*/{run_id}"):
            if (path / "attempts").is_dir():
                return RunDirectory(path.absolute())
        if process.poll() not in (None, 0):
            raise _not_started(said)
        time.sleep(_LOOK_EVERY_SECONDS)
    raise GradusError(f"the test run did not start within {_BEGIN_SECONDS:.0f} s")


def _not_started(said: TextIO) -> GradusError:
    """With the message of the document that `--json` prints, after whatever else was said."""
    said.seek(0)
    text = said.read()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        document, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])  # more may have been said after it
        error = document["error"]
        kind = InputError if document.get("exit_code") == EXIT_BAD_INPUT else GradusError
        return kind(f"the test run did not start: {error['message']}", hint=error.get("hint"))
    last = next(iter(text.strip().splitlines()[-1:]), "")
    return GradusError(f"the test run did not start: {last}", output=text[-2000:])


def _until(run: RunDirectory, what: Callable[[], bool], otherwise: str) -> None:
    give_up_at = time.monotonic() + _BEGIN_SECONDS
    while not what():
        status = read_status(run)
        state = shown_state(status) if status else "unknown"
        if state in ("finished", "failed", "stopped", "lost") or time.monotonic() > give_up_at:
            error = f": {status.last_error}" if status and status.last_error else ""
            raise GradusError(f"the test run is {state} and {otherwise}{error}", hint="give the recipe more steps")
        time.sleep(_LOOK_EVERY_SECONDS)
