"""Collective timeout: ranks that waited for one that did not come, and which one that was.

Of a run of ours the watchdog has said so. Of any script there are the messages of NCCL, gloo and the store: whoever
complains was there, and who does not is the one that others waited for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gradus.diagnosis.demise import Demise
from gradus.diagnosis.finding import Finding

_NCCL = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<kind>\w+),"
    r".*?Timeout\(ms\)=(?P<limit>\d+)\)"
)
_NCCL_COUNTS = re.compile(
    r"last enqueued (?:NCCL )?work: (?P<enqueued>\d+), last completed (?:NCCL )?work: (?P<done>\d+)"
)
_GLOO = re.compile(r"Timed out waiting (?P<limit>\d+)ms for (?:recv|send) operation to complete")
_BARRIER = re.compile(
    r"[Rr]anks? (?P<ranks>\d+(?:, ?\d+)*) failed to (?:pass|reach) monitoredBarrier(?: in (?P<limit>\d+) ?ms)?"
)
_CLIENTS = re.compile(
    r"Timed out after (?P<limit>\d+) seconds waiting for clients\. (?P<there>\d+)/(?P<all>\d+) clients"
)
_KEYS = re.compile(r"wait timeout after (?P<limit>\d+) ?ms, keys: (?P<keys>\S+)")
_CONNECT = re.compile(
    r"client socket has timed out after (?P<limit>\d+) ?ms while trying to connect to \((?P<to>[^)]+)\)"
)
_ANY = (_NCCL, _GLOO, _BARRIER, _CLIENTS, _KEYS, _CONNECT)
_ASKED_FOR = {"ALLREDUCE": "all-reduce", "_ALLGATHER_BASE": "all-gather", "ALLGATHER": "all-gather"}


@dataclass(frozen=True)
class _Waiting:
    """What the messages of one rank say."""

    limit_seconds: float | None
    number: int | None = None  # of the collective, counted by NCCL
    kind: str | None = None
    enqueued: int | None = None


def collective_timeout(demise: Demise) -> Finding | None:
    if demise.error.get("kind") == "hang":
        return _watched(demise)
    if not any(words.search(demise.said) or words.search(demise.log) for words in _ANY):
        return None
    if demise.error.get("kind") not in (None, "lost-peer", "rank-died", "launch-failed", "lost") and not any(
        words.search(demise.said) for words in _ANY
    ):
        return None  # a rank failed by itself, and others waited for it: that is the reason
    joined = _CLIENTS.search(demise.said) or _CLIENTS.search(demise.log)
    if joined is not None:
        return _never_met(demise, int(joined["there"]), int(joined["all"]), float(joined["limit"]))
    reached = _CONNECT.search(demise.said) or _CONNECT.search(demise.log)
    if reached is not None and not _waiting(demise):
        return _no_way(demise, reached["to"], float(reached["limit"]) / 1000)
    return _from_logs(demise)


def _watched(demise: Demise) -> Finding:
    """A run of ours: all ranks were asked where they are."""
    error = demise.error
    evidence: dict[str, Any] = {**demise.facts, "seconds_without_progress": error.get("seconds")}
    if error.get("stacks"):
        evidence["stacks"] = error["stacks"]
    where = f"see what {demise.who} was doing in {error['stacks']}" if error.get("stacks") else f"look at {demise.who}"
    mend = "a collective that not all ranks call, a lock, or a read that never returns; then"
    patience = f"a run that is only slow needs --set watchdog.at_least={_patience(demise)}"
    change = f"{where}: {mend} {demise.again}; {patience}"
    return Finding("collective-timeout", demise.first_line, evidence, change, None, "high", "fatal")


def _patience(demise: Demise) -> str:
    seconds = demise.error.get("seconds")
    minutes = max(10, round(float(seconds) / 60 * 2)) if isinstance(seconds, (int, float)) else 10
    return f"{minutes}m"


def _from_logs(demise: Demise) -> Finding:
    waiting = _waiting(demise)
    named = [int(rank) for match in _BARRIER.finditer(demise.log) for rank in match["ranks"].split(",")]
    world = demise.evidence.ranks
    absent, how, confidence = _absent(waiting, sorted(set(named)), world)
    limit = max((one.limit_seconds for one in waiting.values() if one.limit_seconds is not None), default=None)
    evidence: dict[str, Any] = {**demise.facts, "ranks_that_waited": sorted(waiting), "absent_ranks": absent}
    if limit is not None:
        evidence["waited_seconds"] = limit
    counts = {rank: one.enqueued for rank, one in waiting.items() if one.enqueued is not None}
    if counts:
        evidence["collectives_given_to_each_gpu"] = counts
    after = f" after {limit:g} s" if limit is not None else ""
    if not absent:
        verdict = f"a collective operation timed out{after}; {how}"
        change = (
            "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 keeps the last collectives of each rank; a loop with gradus.Run in it "
            "says who is behind"
        )
        return Finding("collective-timeout", verdict, evidence, change, None, "low", "fatal")
    node = demise.nodes_of_ranks.get(absent[0])
    who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
    if node is not None:
        evidence["node"] = node
    evidence["rank"] = absent[0]
    last = [line for line in demise.lines_of_ranks.get(absent[0], []) if line.strip()][-1:]
    if last:
        evidence["its_last_line"] = last[0]
    waited = f" {limit:g} s" if limit is not None else ""
    verdict = f"ranks waited{waited} for {who}{f' on {node}' if node else ''} in a collective operation: {how}"
    at = f"; the others wait at {demise.place}" if demise.place else ""
    change = (
        f"see what {who} does instead of that collective (its last output: {last[0] if last else 'none'}{at}): every "
        "rank has to call every collective, in the same order; work of one rank alone goes before a barrier, and needs "
        "init_process_group(timeout=...) to be longer than it takes"
    )
    return Finding("collective-timeout", verdict, evidence, change, None, confidence, "fatal")


def _absent(waiting: dict[int, _Waiting], named: list[int], world: int) -> tuple[list[int], str, Any]:
    """The ranks that did not come, how that is known, and how sure it is."""
    if named:
        return named, "a monitored barrier names it", "high"
    given = {rank: one.enqueued for rank, one in waiting.items() if one.enqueued is not None}
    if len(given) > 1 and len(set(given.values())) > 1:
        least = min(given.values())
        behind = sorted(rank for rank, count in given.items() if count == least)
        return behind, f"its GPU was given {least} collectives, another one {max(given.values())}", "high"
    silent = sorted(set(range(world)) - set(waiting))
    if waiting and silent and len(silent) < world:
        return silent, "all others say that they waited", "high" if len(silent) == 1 else "medium"
    kinds = {rank: (one.number, one.kind) for rank, one in waiting.items() if one.kind is not None}
    if len(kinds) > 1 and len(set(kinds.values())) > 1:
        usual = max(set(kinds.values()), key=list(kinds.values()).count)
        other = sorted(rank for rank, kind in kinds.items() if kind != usual)
        what = ", ".join(f"rank {rank}: {kinds[rank][1]} {kinds[rank][0]}" for rank in other)
        return other, f"it was in another one than the rest ({what}; the rest: {usual[1]} {usual[0]})", "high"
    return [], "all ranks were in the same one, so the network between them is in doubt", "low"


def _waiting(demise: Demise) -> dict[int, _Waiting]:
    """By rank: what it says that it waited for."""
    found: dict[int, _Waiting] = {}
    for rank, lines in demise.lines_of_ranks.items():
        text = "\n".join(lines)
        match = _NCCL.search(text)
        if match is not None:
            counts = _NCCL_COUNTS.search(text)
            enqueued = int(counts["enqueued"]) if counts is not None else None
            found[rank] = _Waiting(float(match["limit"]) / 1000, int(match["number"]), match["kind"], enqueued)
        elif (plain := _GLOO.search(text) or _KEYS.search(text)) is not None:
            found[rank] = _Waiting(float(plain["limit"]) / 1000)
    return found


def _never_met(demise: Demise, there: int, wanted: int, seconds: float) -> Finding:
    evidence = {**demise.facts, "ranks_that_came": there, "ranks_expected": wanted, "waited_seconds": seconds}
    silent = sorted(set(range(wanted)) - set(demise.lines_of_ranks))
    if silent:
        evidence["silent_ranks"] = silent
    verdict = f"only {there} of {wanted} ranks came to the meeting point within {seconds:g} s"
    change = (
        "start as many ranks as WORLD_SIZE says, all with the same MASTER_ADDR and MASTER_PORT; "
        f"{demise.start} does that; gradus preflight finds a node that cannot reach the first one"
    )
    return Finding("collective-timeout", verdict, evidence, change, None, "high", "fatal")


def _no_way(demise: Demise, to: str, seconds: float) -> Finding:
    evidence = {**demise.facts, "address": to, "waited_seconds": seconds}
    verdict = f"{demise.who} could not connect to rank 0 at ({to}) within {seconds:g} s"
    change = (
        "MASTER_ADDR has to be the name of the first node as others know it, and its port open between nodes: "
        "network.interface in the cluster file says by which network"
    )
    return Finding("collective-timeout", verdict, evidence, change, None, "high", "fatal")
