"""Demise: how a run ended badly, or why it has not begun: all that its files, its logs and Slurm say of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gradus.checkpoint.manifest import committed_steps
from gradus.diagnosis.evidence import Evidence
from gradus.launcher.error_signature import place_in_users_code
from gradus.launcher.last_words import LastWords, last_words
from gradus.launcher.result import Result
from gradus.launcher.run_logs import job_outputs, last_lines
from gradus.launcher.slurm.queue import queue, submissions
from gradus.launcher.slurm.standing import Standing, standing
from gradus.launcher.story import local_state
from gradus.record.directory import RunDirectory
from gradus.record.format import first_line

_LOG_LINES = 2000  # of each node: eight ranks that all print a long traceback
_JOB_LINES = 200
_RANK_LINE = re.compile(r"\[rank(\d+)\]:\s?(.*)")
# Errors that say that something else went wrong: what did, has to be looked for in the logs.
_EFFECTS = (None, "lost", "lost-peer", "launch-failed", "rank-died", "node-lost", "agent-lost")
# How a node's log ends a line of a rank's own error.
_FRAME = re.compile(r"^(?P<file>.+?), line (?P<line>\d+)\b")


@dataclass(frozen=True)
class Demise:
    """A run that is over and did not end well, or that waits in a queue."""

    evidence: Evidence
    run: RunDirectory
    state: str  # failed, lost, queued
    error: dict[str, Any]
    standing: Standing | None  # None: no scheduler has it

    @property
    def message(self) -> str:
        return str(self.error.get("message") or "").strip()

    @property
    def first_line(self) -> str:
        return first_line(self.message)

    @property
    def traceback(self) -> str:
        return str(self.error.get("traceback") or "")

    @property
    def said(self) -> str:
        """What the rank that failed first said."""
        return "\n".join((self.message, self.traceback, str(self.error.get("output") or "")))

    @property
    def is_an_effect(self) -> bool:
        """Whether the error only says that something went wrong elsewhere."""
        return self.error.get("kind") in _EFFECTS

    @cached_property
    def text(self) -> str:
        """That, and where it does not tell what happened, what all others said too."""
        return self.said if not self.is_an_effect else "\n".join((self.said, self.log))

    @cached_property
    def log(self) -> str:
        """All that nodes and the job's shell said in the end."""
        return "\n".join((*(line for lines in self._lines.values() for line in lines), *self.job_lines))

    @cached_property
    def job_lines(self) -> list[str]:
        outputs = job_outputs(self.run) if self.run.job.is_dir() else []
        return last_lines(outputs[-1], _JOB_LINES) if outputs else []

    @cached_property
    def _lines(self) -> dict[str, list[str]]:
        """By node: the end of its log."""
        folder = self.run.attempt_path(self.evidence.attempt) / "logs"
        return {path.stem: last_lines(path, _LOG_LINES) for path in sorted(folder.glob("*.log"))}

    @cached_property
    def lines_of_ranks(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for lines in self._lines.values():
            for line in lines:
                if (match := _RANK_LINE.match(line)) is not None:
                    found.setdefault(int(match[1]), []).append(match[2])
        return found

    @cached_property
    def nodes_of_ranks(self) -> dict[int, str]:
        """As far as a rank has printed anything."""
        return {
            int(match[1]): node
            for node, lines in self._lines.items()
            for line in lines
            if (match := _RANK_LINE.match(line)) is not None
        }

    @cached_property
    def words(self) -> dict[int, LastWords]:
        return {rank: last_words(lines) for rank, lines in self.lines_of_ranks.items()}

    @property
    def who(self) -> str:
        """`rank 1 on n2`, as far as it is known."""
        rank, node = self.error.get("rank"), self.error.get("node")
        return f"rank {rank}{f' on {node}' if node else ''}" if rank is not None else "a rank"

    @property
    def place(self) -> str | None:
        """`train.py, line 31, in step: loss.backwrad()`, in the user's own code."""
        return place_in_users_code(self.traceback or "\n".join(self.last_output))

    @property
    def last_output(self) -> list[str]:
        """The last lines of a rank that left without an exception: of a syntax error, say, or of sys.exit(text)."""
        lines = str(self.error.get("output") or "").splitlines()
        return [line.strip() for line in lines if line.strip()]

    @property
    def facts(self) -> dict[str, Any]:
        """Where and when: for the evidence of any finding about it."""
        found: dict[str, Any] = {"state": self.state, "attempt": self.evidence.attempt}
        found |= {name: self.error[name] for name in ("rank", "node", "log") if self.error.get(name) is not None}
        if self.evidence.status is not None and self.evidence.script is None:
            found["step"] = self.error.get("step", self.evidence.status.step)
        if self.place is not None and (match := _FRAME.match(self.place)) is not None:
            found |= {"file": match["file"], "line": int(match["line"])}
        return found

    @property
    def resume(self) -> str:
        """The command that goes on with it."""
        verb = "submit" if self.standing is not None else "train"
        return f"gradus {verb} --resume {self.run.name}/{self.run.id}"

    @property
    def again(self) -> str:
        """That command, and where it goes on from if that is not a checkpoint."""
        if self.evidence.recipe is None:
            return f"{self.resume}, which goes on from what the script itself saved, or starts over"
        if committed_steps(self.run.checkpoints):
            return self.resume
        return f"{self.resume}, which starts over: there is no checkpoint yet"

    @property
    def start(self) -> str:
        """The command that makes such a run anew, as far as it is known."""
        verb, script = ("submit" if self.standing is not None else "train"), self.evidence.script
        if script is not None:
            return f"gradus {verb} --nproc {script.ranks} -- {script.text}"
        return f"gradus {verb} {Path(self.run.name).name}.yaml"


def demise_of(evidence: Evidence) -> Demise | None:
    """None: the run goes on, ended well, or was stopped because somebody asked for it."""
    run = evidence.run
    if run is None:
        return None
    submitted = bool(submissions(run))
    if not run.attempts and not submitted:
        return None
    now = None
    if submitted:
        asked, thorough = (queue(), False) if evidence.is_watched else (queue(0), True)
        now = standing(run, evidence.status, asked, thorough=thorough)
    state = now.state if now is not None else local_state(evidence.status)
    if state not in ("failed", "lost", "queued"):
        return None
    if state == "queued" or not run.attempts:
        return Demise(evidence, run, state, {}, now)
    error = Result.load(run.path).error or {}
    if error.get("kind") == "interrupted":
        return None
    if not error and evidence.status is not None and evidence.status.last_error:
        error = {"message": evidence.status.last_error}
    return Demise(evidence, run, state, dict(error), now)
