"""Host sync: the user's own loop waits for the device at every step, so that the device waits for the next launch.

Found in the text of the user's files, and, where there is a trace, measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Confidence, Finding
from gradus.diagnosis.timeline.trace_analysis import SyncPoint, TraceAnalysis
from gradus.diagnosis.user_source.files import UserFile, user_files
from gradus.diagnosis.user_source.waits import Wait, waits_in
from gradus.record.format import count_text

# Once a step, but for the first: what happens now and then (every tenth step) costs next to nothing.
_EVERY_STEP = 0.6
# Of the step time, as a trace shows it: below this nobody gains anything by changing the code.
_WORTH_TELLING = 0.01
_NOT_THE_STEP = ("data", "evaluation", "checkpoint")  # phases in which it may wait
_SHOWN = 8
_EVERY = 50


def host_sync(evidence: Evidence) -> Finding | None:
    files = user_files(evidence)
    beside = {file.path: file.text for file in files}
    arguments = evidence.script.arguments if evidence.script is not None else ()
    found = [
        wait
        for file in files
        for wait in waits_in(file.path, file.text, functions=file.functions, arguments=arguments, beside=beside)
    ]
    waits = list({wait.place: wait for wait in found}.values())
    traced = [trace for trace in evidence.traces if trace.device == "cuda" and trace.span_seconds > 0]
    # On a CPU a dataset may read numbers as it likes: there the text of the loop knows better, if there is one.
    measured = _in_users_code(traced if evidence.run is not None else evidence.traces)
    known = {(Path(wait.file).name, wait.line) for wait in waits}
    waits += [_as_wait(sync) for sync in measured if (Path(str(sync.file)).name, sync.line) not in known]
    share = max((_share(trace) for trace in traced), default=None)
    if not waits:
        return _without_a_place(traced, share)
    if share is not None and share < _WORTH_TELLING:
        return None  # measured, and harmless
    return _told(evidence, files, waits, measured, share)


def _told(
    evidence: Evidence, files: Sequence[UserFile], waits: list[Wait], measured: list[SyncPoint], share: float | None
) -> Finding:
    seconds = {(Path(str(sync.file)).name, sync.line): sync.seconds for sync in measured}
    waits = sorted(waits, key=lambda wait: -seconds.get((Path(wait.file).name, wait.line), 0.0))
    first = waits[0]
    found: dict[str, Any] = {
        "file": first.file,
        "line": first.line,
        "code": first.code,
    }
    if len(waits) > 1:
        found |= {"places": [f"{wait.place}: {wait.code}" for wait in waits[:_SHOWN]], "places_in_all": len(waits)}
    if share is not None:
        found["share"] = share
    if measured:
        found["host_waits"] = [sync.document() for sync in measured[:_SHOWN]]
    more = f", and {count_text(len(waits) - 1, 'more place')}" if len(waits) > 1 else ""
    verdict = f"the host waits for the device at every step: {first.place} `{first.code}` ({first.why}{more})"
    missing = [note for file in files if str(file.path) == first.file for note in file.note]
    confidence: Confidence = "high"
    if share is None:
        on_gpu = evidence.has_gpu
        confidence = "medium" if on_gpu else "low"
        missing.append(
            "the seconds that it costs: gradus train --profile steps=5,stacks measures them"
            if on_gpu
            else "the seconds that it costs: on a CPU there is little to wait for, on a GPU a step may be launch-bound"
        )
    return Finding(
        *("host-sync", verdict, found, _change(evidence, first), share, confidence),
        not_measured=tuple(missing),
    )


def _change(evidence: Evidence, wait: Wait) -> str:
    if "synchronize" in wait.why or "barrier" in wait.why or "empty_cache" in wait.why:
        return f"{wait.place}: take the line `{wait.code}` out of the loop"
    if evidence.recipe is not None:
        return (
            f"{wait.place}: take it out of the step; metrics.jsonl has the loss of every step, read without waiting, "
            "and a hook has it as run.loss"
        )
    if ".item()" in wait.code and not wait.code.startswith(("print", "if ", "assert", "while")):
        kept = wait.code.replace(".item()", ".detach()")
        return f"{wait.place}: `{kept}`, and .item() after the loop, or at every {_EVERY}th step"
    return f"{wait.place}: only now and then: `if step % {_EVERY} == 0:` around `{wait.code}`"


def _in_users_code(traced: Sequence[TraceAnalysis]) -> list[SyncPoint]:
    """Of the trace that has most of them: those with a line of the user's own, at every step."""
    found = [
        [
            sync
            for sync in trace.syncs
            if sync.file is not None and not sync.by_library and sync.phase not in _NOT_THE_STEP
            if _is_often(sync, trace)
        ]
        for trace in traced
    ]
    most: list[SyncPoint] = max(found, key=lambda syncs: len(syncs), default=[])
    return sorted(most, key=lambda sync: -sync.seconds)


def _is_often(sync: SyncPoint, trace: TraceAnalysis) -> bool:
    per_step = sync.per_step or (sync.count / trace.steps if trace.steps else 0.0)
    return per_step >= _EVERY_STEP


def _as_wait(sync: SyncPoint) -> Wait:
    file, line = str(sync.file), int(sync.line or 0)
    return Wait(file, line, sync.name, f"{sync.name} waits for the device, {sync.count} times in the trace")


def _share(trace: TraceAnalysis) -> float:
    """Of the step in which the device was idle because the host had waited for it, and so launched nothing."""
    return min(1.0, trace.sync_blocked_seconds / trace.span_seconds)


def _without_a_place(traced: Sequence[TraceAnalysis], share: float | None) -> Finding | None:
    """A trace shows that the host waits, and neither it nor the text says where."""
    if share is None or share < 5 * _WORTH_TELLING:
        return None
    trace = max(traced, key=lambda one: one.sync_blocked_seconds)
    often = [sync.document() for sync in trace.syncs if _is_often(sync, trace)][:_SHOWN]
    found = {"sync_blocked_seconds": trace.per_step(trace.sync_blocked_seconds), "share": share, "host_waits": often}
    verdict = f"the device is idle for {share:.0%} of the step while the host waits for it"
    change = "gradus train --profile steps=5,stacks names the lines that wait; take them out of the loop"
    return Finding("host-sync", verdict, found, change, share, "medium", not_measured=("where: no stacks recorded",))


RULES = (host_sync,)
