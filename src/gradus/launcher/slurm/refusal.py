"""What follows a preflight that found something wrong: the run goes on without some nodes, or not at all."""

from __future__ import annotations

import json

from gradus.launcher.slurm.description import PREFLIGHT_FILE
from gradus.launcher.slurm.own_job import excluded
from gradus.launcher.verdict import Verdict
from gradus.record.directory import RunDirectory

_MOST_EXCLUDED = 4  # by preflights: more are no broken nodes, but something that all of them have in common


def refused_nodes(run: RunDirectory, code: int) -> Verdict:
    """Whether other nodes may do better."""
    try:
        document = json.loads((run.job / PREFLIGHT_FILE).read_text())
        bad = [str(name) for name in document.get("exclude", [])]
    except (OSError, ValueError, AttributeError):
        return Verdict("failed", f"the preflight ended with {code} and left no report")
    before = excluded(run)
    new = [name for name in bad if name not in before]
    if not new:
        return Verdict("give-up", "the preflight found something wrong that no node is to blame for; see above")
    if len(before) + len(new) > _MOST_EXCLUDED:
        return Verdict("give-up", f"the preflight blames {', '.join(new)} after {', '.join(before)}: too many nodes")
    return Verdict("exclude", f"the preflight blames {', '.join(new)}: the run goes on without", (*before, *new))
