"""One node's task of a preflight, started by hand: `python preflight_task.py JSON`. The first prints the report."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gradus.launcher.preflight.node import Task, run_task
from gradus.schema.cluster import Cluster

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    cluster = Cluster(**given["cluster"])
    found = run_task(
        Task(
            given["index"],
            tuple(given["names"]),
            tuple(given["hub"]),
            given["port"],
            "key",
            Path(given["folder"]),
            cluster,
            given["seconds"],
        )
    )
    if found is not None:
        print(json.dumps(found.document()), flush=True)
    os._exit(0)
