"""Judging: from what all nodes said of themselves and of each other to findings, against what the cluster promises."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradus.hardware.catalogue import find_gpu
from gradus.launcher.preflight.facts import NodeFacts, Space
from gradus.launcher.preflight.links import connections, measurements
from gradus.launcher.preflight.report import Finding, Heard, Preflight
from gradus.record.format import bytes_text
from gradus.record.status import LOST_AFTER
from gradus.schema.cluster import Cluster

# Events of several writers are put in order by their clocks, and a run counts as lost after a minute of silence: with
# half of that between clocks, a run that is alive looks lost to other nodes.
_CLOCK_WARNING_SECONDS = 1.0
_CLOCK_ERROR_SECONDS = LOST_AFTER.total_seconds() / 2
# A loader's workers hand batches over in /dev/shm: 64 MiB is what a container has by default, and is soon full.
_LEAST_SHM_BYTES = 1 << 30
_LEAST_FREE_BYTES = 10 << 30
_LEAST_FREE_SHARE = 0.02
_MEMORY_SHARE = 0.85  # of what is promised: the system and the scheduler keep some of it


def judged(
    names: Sequence[str], reports: Mapping[int, Mapping[str, Any]], cluster: Cluster | None, seconds: float
) -> Preflight:
    """The findings of all checks. `reports` has what each node said, by its number."""
    heard = [Heard(names[at], NodeFacts.of(said["facts"]), said) for at, said in sorted(reports.items())]
    findings: list[Finding] = [*_answered(names, heard)]
    if heard:
        for check in (_clocks, _versions, _addresses, _space, _shared, connections):
            findings += check(heard)
        for against_promises in (_memory, _gpus):
            findings += against_promises(heard, cluster)
        findings += measurements(names, heard, cluster)
    return Preflight(tuple(names), tuple(findings), seconds)


def _answered(names: Sequence[str], heard: Sequence[Heard]) -> Iterator[Finding]:
    silent = [name for name in names if name not in {node.name for node in heard}]
    if silent:
        text = f"{_of(silent, names)} did not answer: no task came up there, or it cannot reach the first node"
        yield Finding("nodes", "error", text, tuple(silent), measured=len(heard), promised=len(names), unit="nodes")
    else:
        text = f"a task answers from {_of(names, names)}"
        yield Finding("nodes", "ok", text, measured=len(heard), promised=len(names), unit="nodes")


def _clocks(heard: Sequence[Heard]) -> Iterator[Finding]:
    """The offsets are against the first node's clock; most nodes decide what is right."""
    if len(heard) < 2:
        return
    offsets = {node.name: float(node.said["clock"]["offset_seconds"]) for node in heard}
    right = statistics.median(offsets.values())
    uncertain = max(float(node.said["clock"]["uncertainty_seconds"]) for node in heard)
    off = {name: offset - right for name, offset in offsets.items()}
    worst = max(off, key=lambda name: abs(off[name]))
    if abs(off[worst]) - uncertain <= _CLOCK_WARNING_SECONDS:
        spread = max(offsets.values()) - min(offsets.values())
        text = f"clocks differ by at most {spread * 1000:.1f} ms (round trips, give or take {uncertain * 1000:.1f} ms)"
        yield Finding("clocks", "ok", text, measured=spread, promised=_CLOCK_WARNING_SECONDS, unit="seconds")
        return
    for name, by in sorted(off.items()):
        if abs(by) - uncertain > _CLOCK_WARNING_SECONDS:
            bad = abs(by) > _CLOCK_ERROR_SECONDS
            text = (
                f"the clock of {name} is {abs(by):.1f} s {'ahead' if by > 0 else 'behind'}: events will be out of order"
            )
            text += ", and a run that is alive may look lost" if bad else ""
            yield Finding(
                *("clocks", "error" if bad else "warning", text, (name,)),
                measured=by,
                promised=_CLOCK_ERROR_SECONDS if bad else _CLOCK_WARNING_SECONDS,
                unit="seconds",
            )


def _versions(heard: Sequence[Heard]) -> Iterator[Finding]:
    names = sorted({name for node in heard for name in node.facts.versions})
    differing = False
    for package in names:
        found = Counter(node.facts.versions.get(package, "none") for node in heard)
        if len(found) > 1:
            differing = True
            usual = found.most_common(1)[0][0]
            others = [node.name for node in heard if node.facts.versions.get(package, "none") != usual]
            said = ", ".join(f"{version} on {count}" for version, count in found.most_common())
            text = f"{package} differs between nodes ({said} nodes): {', '.join(others)} is not as the others"
            yield Finding("versions", "error", text, tuple(others))
    if not differing:
        known = ", ".join(f"{name} {version}" for name, version in sorted(heard[0].facts.versions.items()))
        where = "the same on all nodes: " if len(heard) > 1 else ""
        yield Finding("versions", "ok", where + known)


def _memory(heard: Sequence[Heard], cluster: Cluster | None) -> Iterator[Finding]:
    least = min(heard, key=lambda node: node.facts.memory_available_bytes)
    facts = least.facts
    free, whole = bytes_text(facts.memory_available_bytes), bytes_text(facts.memory_bytes)
    text = f"at least {free} of {whole} is free ({least.name})"
    used = facts.memory_available_bytes < facts.memory_bytes / 4
    text += ": another job, or what one left behind, takes the rest" if used else ""
    yield Finding("memory", "warning" if used else "ok", text, measured=facts.memory_available_bytes, unit="bytes")
    promised = cluster.memory_gib * 2**30 if cluster else 0.0
    for node in heard:
        if node.facts.memory_bytes < _MEMORY_SHARE * promised:
            text = (
                f"{node.name} has {bytes_text(node.facts.memory_bytes)}, the cluster file says {bytes_text(promised)}"
            )
            yield Finding("memory", "warning", text, (node.name,), None, node.facts.memory_bytes, promised, "bytes")


def _addresses(heard: Sequence[Heard]) -> Iterator[Finding]:
    several_hosts = len({node.facts.identity for node in heard}) > 1
    well = True
    for node in heard:
        facts = node.facts
        if facts.address is None:
            well = False
            text = f"{node.name}: {facts.address_of}: {facts.address_problem}"
            yield Finding("addresses", "error" if len(heard) > 1 else "warning", text, (node.name,))
        elif several_hosts and facts.address.startswith("127."):
            well = False
            text = (
                f"{node.name}: its {facts.address_of} stands for {facts.address}, where no other node finds it; name "
                "the network interface in the cluster file (network.interface), or mend its /etc/hosts"
            )
            yield Finding("addresses", "error", text, (node.name,))
    if well:
        one = heard[0].facts
        many = f"and so on, {len(heard)} in all" if len(heard) > 1 else ""
        yield Finding("addresses", "ok", f"{one.node} is {one.address} ({one.address_of}) {many}".strip())


def _gpus(heard: Sequence[Heard], cluster: Cluster | None) -> Iterator[Finding]:
    promised = cluster.gpus_per_node if cluster else None
    kind = cluster.gpu_name if cluster else None
    for node in heard:
        facts = node.facts
        if facts.driver is None and facts.gpus == 0:
            continue
        for problem in facts.gpu_problems:
            yield Finding("GPUs", "error", f"{node.name}: {problem}", (node.name,))
        if promised is not None and facts.gpus < promised:
            text = f"{node.name} has {facts.gpus} GPUs that this job can use; the cluster file says {promised}"
            yield Finding("GPUs", "error", text, (node.name,), None, facts.gpus, promised, "GPUs")
        known = find_gpu(kind) if kind else None
        other = [name for name in facts.gpu_names if known is not None and find_gpu(name) not in (known, None)]
        if other:
            text = f"{node.name} has {', '.join(sorted(set(other)))}; the cluster file says {kind}"
            yield Finding("GPUs", "error", text, (node.name,))
        if len(set(facts.gpu_ecc)) > 1:
            yield Finding("GPUs", "warning", f"{node.name}: ECC is on for some of its GPUs and off for others")
    with_driver = [node for node in heard if node.facts.driver is not None or node.facts.gpus]
    without = tuple(node.name for node in heard if node not in with_driver)
    if promised and without and with_driver:
        text = f"{', '.join(without)}: no NVIDIA driver answers, while it does on other nodes"
        yield Finding("GPUs", "error", text, without, None, 0, promised, "GPUs")
    elif promised and without:
        text = f"the cluster file says {promised} GPUs, but no node has an NVIDIA driver: ranks run on the CPU"
        yield Finding("GPUs", "warning", text, measured=0, promised=promised, unit="GPUs")
    elif not with_driver:
        yield Finding("GPUs", "ok", "none here, and none promised")
    elif not any(node.facts.gpu_problems for node in with_driver):
        hottest = max((c for node in with_driver for c in node.facts.gpu_celsius if c is not None), default=None)
        counted = Counter(name for node in with_driver for name in node.facts.gpu_names)
        text = ", ".join(f"{count} × {name}" for name, count in counted.items())
        text += f", no errors{f', at most {hottest} °C' if hottest is not None else ''}"
        yield Finding("GPUs", "ok", text, measured=sum(counted.values()), unit="GPUs")


def _space(heard: Sequence[Heard]) -> Iterator[Finding]:
    for name, title in (("shared", "shared folder"), ("local", "local disk"), ("shm", "/dev/shm")):
        rooms = [(node.name, node.facts.space[name]) for node in heard]
        for node, missing in ((node, room) for node, room in rooms if isinstance(room, str)):
            # Of the shared folder another check tells.
            if name != "shared":
                yield Finding("space", "warning", f"{node}: {missing}", (node,))
        there = [(node, room) for node, room in rooms if isinstance(room, Space)]
        if not there:
            continue
        node, least = min(there, key=lambda pair: pair[1].free_bytes)
        limit = (
            _LEAST_SHM_BYTES if name == "shm" else min(_LEAST_FREE_BYTES, int(_LEAST_FREE_SHARE * least.total_bytes))
        )
        short = least.free_bytes < limit
        text = f"{bytes_text(least.free_bytes)} of {bytes_text(least.total_bytes)} free on the {title}"
        text += f" of {node}" if len(heard) > 1 and name != "shared" else ""
        text += f"; less than {bytes_text(limit)} is soon full" if short else ""
        yield Finding(
            *("space", "warning" if short else "ok", text), measured=least.free_bytes, promised=limit, unit="bytes"
        )


def _shared(heard: Sequence[Heard]) -> Iterator[Finding]:
    bad = False
    path = heard[0].said["shared"]["path"]
    for node in heard:
        if node.said["shared"]["problem"]:
            bad = True
            text = f"{node.name} cannot write to {path}: {node.said['shared']['problem']}"
            yield Finding("shared folder", "error", text, (node.name,))
    unseen = {node.name: tuple(node.said["shared"].get("unseen", ())) for node in heard}
    wrote = [node.name for node in heard if not node.said["shared"]["problem"]]
    blind = [name for name, missing in unseen.items() if set(wrote) - {name} and set(missing) >= set(wrote) - {name}]
    lonely = [name for name in wrote if all(name in missing for other, missing in unseen.items() if other != name)]
    alone = [name for name in wrote if name in blind and name in lonely]
    if len(wrote) > 1 and len(alone) == len(wrote):
        bad = True
        yield Finding("shared folder", "error", f"{path} is on every node another folder: no node sees another's files")
    else:
        for name in alone:
            bad = True
            text = f"{name} has another {path} than the other nodes: it sees no file of theirs, and they none of it"
            yield Finding("shared folder", "error", text, (name,))
        for name, missing in unseen.items():
            late = [other for other in missing if other not in alone and other in wrote]
            if late and name not in alone:
                bad = True
                seconds = node_seconds(heard, name)
                text = f"{name} does not see in {path} what {', '.join(late)} wrote {seconds:.0f} s before"
                yield Finding("shared folder", "error", text, (name,), measured=seconds, unit="seconds")
    if not bad:
        slowest = max(heard, key=lambda node: node.said["shared"].get("seen_seconds", 0.0))
        seconds = float(slowest.said["shared"].get("seen_seconds", 0.0))
        text = f"{path} is writable" + (
            f" on all nodes, and each sees what the others write within {seconds * 1000:.0f} ms"
            if len(heard) > 1
            else ""
        )
        yield Finding("shared folder", "ok", text, measured=seconds, unit="seconds")


def node_seconds(heard: Sequence[Heard], name: str) -> float:
    return next(float(node.said["shared"].get("seen_seconds", 0.0)) for node in heard if node.name == name)


def _of(some: Sequence[str], everybody: Sequence[str]) -> str:
    if len(some) == len(everybody) > 4:
        return f"all {len(some)} nodes"
    return ", ".join(some)
