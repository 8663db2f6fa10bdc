"""`gradus preflight`: are these nodes fit for a run?"""

from __future__ import annotations

import sys
from pathlib import Path

from gradus.cli.output import print_json
from gradus.launcher.preflight.starting import Asked, run_preflight
from gradus.schema.cluster import Cluster
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED


def preflight_command(cluster: str | None, nodes: int | None, runs: str, as_json: bool) -> int:
    given = Cluster.load(cluster) if cluster else None
    found = run_preflight(Asked(given, nodes, Path(runs)), lambda text: print(text, file=sys.stderr, flush=True))
    if as_json:
        print_json({**found.document(), "exit_code": EXIT_FINISHED if found.fit else EXIT_FAILED})
    else:
        print("\n".join(found.lines()))
    return EXIT_FINISHED if found.fit else EXIT_FAILED
