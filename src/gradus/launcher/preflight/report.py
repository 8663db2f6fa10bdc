"""The report of a preflight: findings, each a plain sentence with what was measured and what was promised."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gradus.launcher.preflight.facts import NodeFacts
from gradus.launcher.preflight.pairs import Pair
from gradus.record import strict_json
from gradus.record.format import count_text

State = Literal["ok", "note", "warning", "error"]
_SIGNS: Mapping[State, str] = {"ok": "ok", "note": "-", "warning": "!", "error": "BAD"}


@dataclass(frozen=True)
class Heard:
    """What one node said."""

    name: str
    facts: NodeFacts
    said: Mapping[str, Any]

    @property
    def ranks(self) -> Sequence[Mapping[str, Any]]:
        ranks: Sequence[Mapping[str, Any]] = self.said.get("ranks", ())
        return ranks


@dataclass(frozen=True)
class Finding:
    """One check. `nodes` are those that it speaks badly of."""

    check: str
    state: State
    text: str
    nodes: tuple[str, ...] = ()
    link: Pair | None = None
    measured: float | None = None
    promised: float | None = None
    unit: str | None = None


@dataclass(frozen=True)
class Preflight:
    """What a preflight found."""

    nodes: tuple[str, ...]
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.state == "error")

    @property
    def bad_nodes(self) -> tuple[str, ...]:
        """The nodes to do without, where the others would do."""
        return tuple(sorted({node for finding in self.errors for node in finding.nodes}))

    @property
    def bad_links(self) -> tuple[Pair, ...]:
        return tuple(sorted({finding.link for finding in self.errors if finding.link is not None}))

    @property
    def exclude(self) -> tuple[str, ...]:
        """Without which nodes the others would do: the bad ones, and of two that only do not get on, one."""
        found = set(self.bad_nodes)
        for one, other in self.bad_links:
            if one not in found and other not in found:
                found.add(other)
        return tuple(sorted(found)) if len(found) < len(self.nodes) else ()

    @property
    def fit(self) -> bool:
        return not self.errors

    def document(self) -> dict[str, Any]:
        return {
            "fit": self.fit,
            "nodes": list(self.nodes),
            "bad_nodes": list(self.bad_nodes),
            "exclude": list(self.exclude),
            "bad_links": [list(link) for link in self.bad_links],
            "seconds": round(self.seconds, 2),
            "findings": [
                {key: value for key, value in asdict(finding).items() if value not in (None, ())}
                for finding in self.findings
            ],
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Preflight:
        findings = [
            Finding(**{**found, "nodes": tuple(found.get("nodes", ())), "link": _pair(found.get("link"))})
            for found in document["findings"]
        ]
        return cls(tuple(document["nodes"]), tuple(findings), document["seconds"])

    def lines(self) -> list[str]:
        """For people: what is wrong last, where the eye is."""
        width = max((len(finding.check) for finding in self.findings), default=0)
        worse: Sequence[State] = ("ok", "note", "warning", "error")
        ordered = sorted(self.findings, key=lambda finding: worse.index(finding.state))
        lines = [f"{_SIGNS[finding.state]:>3}  {finding.check:<{width}}  {finding.text}" for finding in ordered]
        return [*lines, self.verdict]

    @property
    def verdict(self) -> str:
        many = count_text(len(self.nodes), "node")
        if self.fit:
            return f"preflight: {many} fit after {self.seconds:.0f} s"
        blamed = [f"node {node}" for node in self.bad_nodes]
        blamed += [f"the link between {one} and {other}" for one, other in self.bad_links]
        return f"preflight: not fit: {', '.join(blamed) or 'see above'} ({many}, {self.seconds:.0f} s)"


def write_report(path: Path, found: Preflight) -> None:
    """It appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.touch(0o600)
    temporary.write_text(strict_json.pretty(found.document()) + "\n")
    temporary.replace(path)


def read_report(path: Path) -> Preflight | None:
    try:
        return Preflight.of(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _pair(given: Sequence[str] | None) -> Pair | None:
    return (given[0], given[1]) if given else None
