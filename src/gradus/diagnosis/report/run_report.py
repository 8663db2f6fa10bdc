"""The report of a run: all that its files tell, as one page that opens anywhere, or as parts that are drawn again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.explain import Explanation, explain
from gradus.diagnosis.report.device_charts import devices_html
from gradus.diagnosis.report.head import OVER, head_of
from gradus.diagnosis.report.judgement import findings_html, versus_plan_html
from gradus.diagnosis.report.marks import events_html, step_marks
from gradus.diagnosis.report.provenance import attempts_html, environment_html, files_html, reproduce_html, traces_html
from gradus.diagnosis.report.time_charts import kinds_html, ranks_html
from gradus.diagnosis.report.training_charts import memory_html, speed_html, training_html
from gradus.record.directory import RunDirectory
from gradus.record.history import History
from gradus.record.page_html import Head, Section, missing, page

# While a run is alive, judging it reads all that it has written, which takes longer than following its files.
LIVE_JUDGE_SECONDS = 30.0


@dataclass
class RunReport:
    """Follows a run's files: each call of `parts` is up to date, and reads only what is new."""

    run: RunDirectory
    judge_every_seconds: float = 0.0
    history: History = field(init=False)
    found: Explanation | None = field(init=False, default=None)
    """What is wrong with it, as `parts` last said."""
    _judged_at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.history = History(self.run)

    def parts(self) -> tuple[Head, list[Section]]:
        """What stands above, and the sections."""
        history = self.history
        history.poll()
        evidence = replace(Evidence.of_run(self.run), is_watched=self.judge_every_seconds > 0)
        marks = step_marks(history)
        found = self.found = self._judgement(evidence)
        prediction = evidence.prediction
        sections = [
            Section("findings", "Findings", findings_html(found, over=evidence.state in OVER)),
            Section("training", "Training", training_html(history, marks)),
            Section("speed", "Speed", speed_html(history, marks)),
            Section("time", "Where the time goes", kinds_html(history, marks)),
            Section("ranks", "Ranks", ranks_html(history)),
            Section("memory", "Memory", memory_html(history, prediction.limit_bytes if prediction else None)),
            Section("devices", "Devices", devices_html(history)),
            Section(
                "plan",
                "Plan against measured",
                versus_plan_html(found.plan_against_measured, predicted=prediction is not None),
            ),
            Section("events", "Events", events_html(history) + self._broken_lines()),
            Section("attempts", "Attempts", attempts_html(self.run, history.events)),
            Section("environment", "Environment", environment_html(evidence)),
            Section("reproduce", "How to reproduce it", reproduce_html(evidence)),
            Section("traces", "Traces", traces_html(self.run) + files_html(self.run)),
        ]
        return head_of(history, evidence), sections

    def _judgement(self, evidence: Evidence) -> Explanation:
        """Of a run that is followed, not anew each time."""
        now = time.monotonic()
        if self.found is not None and now - self._judged_at < self.judge_every_seconds:
            return self.found
        self._judged_at = now
        return explain(evidence)

    def page(self) -> str:
        return page(*self.parts())

    def _broken_lines(self) -> str:
        count = self.history.broken_lines
        if not count:
            return ""
        lines = "lines" if count > 1 else "line"
        return missing(
            f"{count} {lines} of its files could not be read and were left out: a writer died, or a disk was full."
        )
