"""Verdict: after an attempt has ended, whether and where the run goes on, and why. A pure function of its history.

What bounds restarts is their rate and not their number: a run of weeks may fail many times. Between two failures it has
to commit a new checkpoint; `retries` is how many attempts in a row may fail to do that. Two in a row that do not even
get further than the run had been before end it sooner, and so does the same error at the same step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradus.record.format import first_line
from gradus.schema.errors import EXIT_BAD_INPUT, EXIT_DO_NOT_RESTART, EXIT_FAILED, EXIT_FINISHED, EXIT_NO_PLAN
from gradus.schema.errors import EXIT_STOPPED as EXIT_CONTINUE

DRILL_IS_OVER = "the drill is over"  # by what a test run of `gradus drill` is stopped
EXIT_AGAIN = 10  # only between the batch script and `job end`: once more in this allocation

EndState = Literal["finished", "stopped", "failed", "lost"]
Decision = Literal["finished", "requeue", "hold", "again", "exclude", "give-up", "failed"]
_EXIT_CODES: dict[Decision, int] = {
    "finished": EXIT_FINISHED,
    "requeue": EXIT_CONTINUE,
    "hold": EXIT_CONTINUE,
    "exclude": EXIT_CONTINUE,
    "again": EXIT_AGAIN,
    "give-up": EXIT_DO_NOT_RESTART,
    "failed": EXIT_FAILED,
}
GOES_ON: frozenset[Decision] = frozenset({"requeue", "again", "exclude"})  # by itself, without a person

# Each of these exit codes and kinds says that the same inputs would fail in the same way.
_HOPELESS_CODES = {EXIT_DO_NOT_RESTART: "do not restart", EXIT_BAD_INPUT: "bad input", EXIT_NO_PLAN: "no plan fits"}
_HOPELESS_KINDS = {"do-not-restart": "do not restart", "bad-input": "bad input", "no-plan": "no plan fits"}
# Stop requests by people. All others (a signal of the scheduler, the clock) are to be continued.
_FOR_GOOD = ("gradus runs cancel", DRILL_IS_OVER)  # after which nobody releases it
_PEOPLE = ("gradus runs stop", "stop file", "stop requested", "SIGINT", *_FOR_GOOD)
_MACHINE_KINDS = ("node-lost", "agent-lost", "preflight", "silent-corruption")
# What drivers, NCCL and kernels say of hardware that is broken, as far as no program can cause it.
_MACHINE_WORDS = re.compile(
    r"uncorrectable ECC|\bECC error|\bXid\b|fallen off the bus|GPU is lost|NVLink error|NVSwitch|fabric manager"
    r"|unhandled system error|ncclSystemError|no CUDA-capable device|devices? (?:is|are) busy or unavailable"
    r"|CUDA driver initialization failed|hardware error|Input/output error|Read-only file system|node agent",
    re.IGNORECASE,
)
_OUT_OF_GPU_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory", re.IGNORECASE)
_LOOKED_AT = 3  # failures back in which a node that comes up twice is suspect: further back it may be chance


def is_of_people(stop_reason: str) -> bool:
    """Whether a person asked for the stop, and is to say when the run goes on."""
    return any(who in stop_reason for who in _PEOPLE)


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: what a line of the ledger says of it."""

    attempt: int
    state: EndState
    exit_code: int | None = None
    step_begun: int = 0
    step_reached: int = 0
    step_saved: int | None = None  # the newest committed checkpoint when it was over
    stop_reason: str | None = None
    error_kind: str | None = None
    error_message: str | None = None
    error_signature: str | None = None  # see error_signature.py: equal for the same deterministic error
    rank: int | None = None
    node: str | None = None  # where it failed
    nodes: tuple[str, ...] = ()
    job_id: str | None = None
    ended_at: str = ""
    counts_steps: bool = True  # a foreign script does not say how far it got

    @property
    def by_people(self) -> bool:
        return self.state == "stopped" and is_of_people(self.stop_reason or "")

    @property
    def for_good(self) -> bool:
        """Whether who stopped it also took it out of the queue."""
        return self.state == "stopped" and any(who in (self.stop_reason or "") for who in _FOR_GOOD)

    @property
    def machine_fault(self) -> bool:
        """Whether one such failure is enough to suspect the node that is named."""
        if self.node is None or self.state == "stopped":
            return False
        if self.state == "lost" or self.error_kind in _MACHINE_KINDS:
            return True
        if self.error_kind == "hang":
            return len(self.nodes) > 1  # who is behind is known only next to others
        return bool(_MACHINE_WORDS.search(self.error_message or ""))

    @property
    def suspect(self) -> str | None:
        """The node that this failure speaks against. Who lost a peer is not the one that failed."""
        if self.machine_fault:
            return self.node
        return self.node if self.error_kind != "lost-peer" and len(self.nodes) > 1 else None

    @property
    def out_of_gpu_memory(self) -> bool:
        return self.error_kind == "out-of-memory" or bool(_OUT_OF_GPU_MEMORY.search(self.error_message or ""))

    def same_error_at_same_step(self, other: Ended) -> bool:
        same = self.error_signature is not None and self.error_signature == other.error_signature
        return same and self.step_reached == other.step_reached


@dataclass(frozen=True)
class Verdict:
    """What is to happen now, with a reason for people."""

    decision: Decision
    reason: str
    exclude: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self.decision]


def verdict(history: Sequence[Ended], retries: int, cancelled: bool = False, nodes_stay: bool = True) -> Verdict:
    """What is to happen after the last attempt of a history. Earlier ones are in the order in which they ended.

    Without `nodes_stay`, the scheduler takes the nodes away: there is no other attempt on them.
    """
    now = history[-1]
    if now.state == "finished":
        how_far = f" at step {now.step_reached}" if now.counts_steps else ""
        return Verdict("finished", f"attempt {now.attempt} finished{how_far}")
    if cancelled:
        return Verdict("failed", f"the job was cancelled during attempt {now.attempt}: it is not requeued")
    if now.by_people:
        follows = "is taken out of the queue" if now.for_good else "waits to be released"
        return Verdict("hold", f"asked to stop by {now.stop_reason!r}; {_saved_text(now)}, and {follows}")
    over = _refused(now, retries) or _same_again(history) or _no_progress(history)
    over = over or _retries_used_up(history, retries)
    if over is not None:
        return over
    if now.state == "stopped":
        return Verdict("requeue", f"asked to stop ({now.stop_reason}); {_saved_text(now)}, and goes on from there")
    node = _suspected_node(history)
    if node is not None:
        return Verdict("exclude", _suspicion_text(history, node), (node,))
    left = retries - _fruitless(history)
    progress = f"{_progress_text(history)}; {left} of {retries} retries left without a new checkpoint"
    if now.state == "lost":
        return Verdict("requeue", f"attempt {now.attempt} was lost and nobody wrote how it ended; {progress}")
    failed = f"attempt {now.attempt} failed ({_error_text(now)})"
    if not nodes_stay:
        return Verdict("requeue", f"{failed}, and the scheduler takes its nodes away; {progress}")
    return Verdict("again", f"{failed}; {progress}")


# -- the ways in which it is over -------------------------------------------------------------------------------------


def _refused(now: Ended, retries: int) -> Verdict | None:
    """What needs no history: the attempt itself says that it must not be repeated, or nobody wants it to be."""
    if now.state not in ("failed", "lost"):
        return None
    why = _HOPELESS_CODES.get(now.exit_code or 0) or _HOPELESS_KINDS.get(now.error_kind or "")
    if why is not None:
        return Verdict("give-up", f"{why}: {_error_text(now)}; another attempt would fail in the same way")
    if now.error_kind == "interrupted":
        return Verdict("failed", f"attempt {now.attempt}: {_error_text(now)}; nothing restarts what a person ended")
    if retries <= 0:
        return Verdict("failed", f"attempt {now.attempt} failed ({_error_text(now)}); no retries were asked for")
    return None


def _same_again(history: Sequence[Ended]) -> Verdict | None:
    """The same error at the same step: it is decided by the work and not by chance, and would come a third time."""
    now = history[-1]
    before = _failures(history[:-1])
    if now.state == "stopped" or not before:
        return None
    last = before[-1]
    if now.out_of_gpu_memory and last.out_of_gpu_memory and not _new_checkpoint(history, len(history) - 1):
        return Verdict(
            "give-up",
            f"a GPU ran out of memory in attempts {last.attempt} and {now.attempt}, with no checkpoint between them: "
            f"the same shapes need the same memory; {_error_text(now)}",
        )
    same = [other for other in _since_new_checkpoint(history) if now.same_error_at_same_step(other)]
    if not now.counts_steps:  # of two errors of a script, nobody knows whether they came at the same place
        same = [other for other in same if other is last]
    if not same or now.machine_fault or _only_one_node_fails([*same, now]):
        return None
    where = f"at step {now.step_reached}" if now.counts_steps else "in a script that does not say how far it got"
    return Verdict(
        "give-up",
        f"the same error {where} in attempts {same[-1].attempt} and {now.attempt}: {_error_text(now)}; "
        "it would come again",
    )


def _only_one_node_fails(same: Sequence[Ended]) -> bool:
    """Whether the node may be the cause: the others never failed, and it has not shown that it can do the work.

    An exception after steps that went well comes from what that step does: a node does not know which step it is.
    """
    if len({ended.suspect for ended in same}) > 1 or same[-1].suspect is None:
        return False
    worked = any(ended.step_reached > ended.step_begun for ended in same)
    return not (worked and same[-1].error_kind == "exception")


def _no_progress(history: Sequence[Ended]) -> Verdict | None:
    """Two failures in a row that got no further. Those of a machine that is left out next time are not the run's."""
    if len(history) < 2:
        return None
    last, now = history[-2:]
    if not all(ended.state in ("failed", "lost") and ended.counts_steps for ended in (last, now)):
        return None
    if any(ended.machine_fault for ended in (last, now)) or _suspected_node(history) is not None:
        return None
    if not (_idle(history, len(history) - 1) and _idle(history, len(history) - 2)):
        return None
    return Verdict(
        "give-up",
        f"no progress twice: attempts {last.attempt} and {now.attempt} ended at steps {last.step_reached} and "
        f"{now.step_reached} with nothing new saved, and the run had been at step {_best_before(history)} before; "
        f"{_error_text(now)}",
    )


def _retries_used_up(history: Sequence[Ended], retries: int) -> Verdict | None:
    fruitless = _fruitless(history)
    if fruitless <= retries:
        return None
    now = history[-1]
    if now.state == "stopped":
        return Verdict(
            "give-up",
            f"{fruitless} attempts in a row ended without a new checkpoint, the last by a stop request "
            f"({now.stop_reason}): the time limit is too short for starting and one step, or saving fails",
        )
    return Verdict(
        "failed",
        f"{fruitless} attempts in a row failed without a new checkpoint, and {retries} retries are allowed; the last: "
        f"{_error_text(now)}",
    )


# -- nodes ------------------------------------------------------------------------------------------------------------


def _suspected_node(history: Sequence[Ended]) -> str | None:
    now = history[-1]
    if now.machine_fault:
        return now.node
    earlier = _failures(history[:-1])[-(_LOOKED_AT - 1) :]
    if now.suspect is not None and any(ended.suspect == now.suspect for ended in earlier):
        return now.suspect
    return None


def _suspicion_text(history: Sequence[Ended], node: str) -> str:
    now = history[-1]
    if now.machine_fault:
        return f"{node} is suspect, a machine's fault: {_error_text(now)}; the run goes on without it"
    named = [ended.attempt for ended in _failures(history)[-_LOOKED_AT:] if ended.suspect == node]
    attempts = " and ".join(str(attempt) for attempt in named)
    return f"{node} is suspect: attempts {attempts} failed on it ({_error_text(now)}); the run goes on without it"


# -- progress ---------------------------------------------------------------------------------------------------------


def _failures(history: Sequence[Ended]) -> list[Ended]:
    return [ended for ended in history if ended.state in ("failed", "lost")]


def _new_checkpoint(history: Sequence[Ended], at: int) -> bool:
    """Whether an attempt committed a checkpoint further than any before. Of a script, to have lasted is progress."""
    ended = history[at]
    if not ended.counts_steps:
        return ended.state == "stopped"
    before = [other.step_saved for other in history[:at] if other.step_saved is not None]
    return ended.step_saved is not None and ended.step_saved > max([ended.step_begun, *before])


def _idle(history: Sequence[Ended], at: int) -> bool:
    """Whether an attempt neither saved anything new nor got further than the run had been."""
    furthest = max([history[at].step_begun, *(other.step_reached for other in history[:at])])
    return history[at].step_reached <= furthest and not _new_checkpoint(history, at)


def _fruitless(history: Sequence[Ended]) -> int:
    """How many attempts in a row, up to the last, committed no new checkpoint."""
    count = 0
    for at in range(len(history) - 1, -1, -1):
        if _new_checkpoint(history, at):
            break
        count += 1
    return count


def _since_new_checkpoint(history: Sequence[Ended]) -> list[Ended]:
    """Failures before the last attempt, back to the one that saved what the run now goes on from, and that one too."""
    found = []
    for at in range(len(history) - 2, -1, -1):
        if history[at].state in ("failed", "lost"):
            found.append(history[at])
        if _new_checkpoint(history, at):
            break
    return found[::-1]


def _best_before(history: Sequence[Ended]) -> int:
    return max([history[0].step_begun, *(ended.step_reached for ended in history[:-2])])


# -- words ------------------------------------------------------------------------------------------------------------


def _progress_text(history: Sequence[Ended]) -> str:
    now = history[-1]
    if not now.counts_steps:
        return "a script does not say how far it got"
    saved = f"saved step {now.step_saved}" if now.step_saved is not None else "saved nothing yet"
    came = f"from step {now.step_begun} to {now.step_reached}"
    return f"it came {came}, {saved}" if not _idle(history, len(history) - 1) else f"no progress ({came}, {saved})"


def _saved_text(now: Ended) -> str:
    if not now.counts_steps:
        return "the script was told to save"
    return f"saved at step {now.step_saved}" if now.step_saved is not None else "nothing is saved yet"


def _error_text(now: Ended) -> str:
    message = first_line(now.error_message or now.error_kind or "no error was recorded")
    where = f"rank {now.rank}" if now.rank is not None else ""
    if now.node is not None and now.node not in message:
        where = f"{where} on {now.node}".strip()
    return f"{where}: {message}" if where and not message.startswith(f"rank {now.rank}") else message
