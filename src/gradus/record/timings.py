"""Timings: where the time of each rank's steps went, `timings/rank-<r>.jsonl`; one line for each log window."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from gradus.record.append_log import log_in_folder
from gradus.record.directory import RunDirectory
from gradus.record.few_lines import few_lines, share_of_lines
from gradus.record.problem import OnProblem, report_on_stderr
from gradus.schema.breakdown import KINDS, Breakdown

FOLDER = "timings"


class TimingLog:
    """The file of one rank."""

    def __init__(self, run: RunDirectory, rank: int, on_problem: OnProblem = report_on_stderr) -> None:
        self._log = log_in_folder(run, FOLDER, f"rank-{rank}", "where time goes is", on_problem)

    def write(self, breakdown: Breakdown) -> None:
        self.write_document(breakdown.model_dump(exclude_none=True))

    def write_document(self, document: Mapping[str, Any]) -> None:
        """The same from plain numbers, for whoever writes often."""
        self._log.write(document)

    def close(self) -> list[str]:
        return self._log.close()


def read_timings(run: RunDirectory, attempt: int | None = None) -> list[Breakdown]:
    """Those of all ranks, or of all in one attempt, by attempt, step and rank. Lines that cannot be read are left out.

    Empty for a run that wrote none, such as one of an older version. A later line of the same step replaces an earlier
    one: the last has what came after it, and a run that went back did the step again.
    """
    found: dict[tuple[int, int, int], Breakdown] = {}
    paths = list((run.path / FOLDER).glob("rank-*.jsonl"))
    for path in paths:
        for record in few_lines(path, share_of_lines(len(paths))):
            try:
                one = Breakdown.model_validate(record)
            except ValidationError:
                continue
            found[one.attempt, one.step, one.rank] = one
    return [found[key] for key in sorted(found) if attempt is None or key[0] == attempt]


def by_rank(breakdowns: Iterable[Breakdown]) -> dict[int, list[Breakdown]]:
    """In the order of ranks; each rank's own keep theirs."""
    ranks: dict[int, list[Breakdown]] = {}
    for one in breakdowns:
        ranks.setdefault(one.rank, []).append(one)
    return dict(sorted(ranks.items()))


def mean_seconds(breakdowns: Sequence[Breakdown]) -> dict[str, float]:
    """Mean seconds of a step by kind, every step counting alike; all kinds are there. Empty without breakdowns."""
    steps = sum(one.steps for one in breakdowns)
    if not steps:
        return {}
    return {kind: sum(one.seconds.get(kind, 0.0) * one.steps for one in breakdowns) / steps for kind in KINDS}


def mean_step_seconds(breakdowns: Sequence[Breakdown]) -> float | None:
    """Mean wall-clock seconds of a step, checkpoint stalls and evaluations included."""
    steps = sum(one.steps for one in breakdowns)
    return sum(one.step_seconds * one.steps for one in breakdowns) / steps if steps else None
