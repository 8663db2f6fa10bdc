"""Ranks of a job that write down where they are: their interpreter, their gradus, their image and some variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slurm.jobs import Jobs
from slurm.lab import Lab

_TELLS = """

import json, sys
from pathlib import Path
import gradus

if "RANK" in os.environ:
    told = {{"python": sys.executable, "base": sys.base_prefix, "gradus": gradus.__file__}}
    told |= {{"in_image": Path("/image-mark").exists(), **{{name: os.environ.get(name) for name in {names}}}}}
    (Path(__file__).parent / f"where-{{os.environ['RANK']}}.json").write_text(json.dumps(told))
"""


def jobs_that_tell(lab: Lab, folder: Path, *variables: str) -> Jobs:
    jobs = Jobs(lab, folder)
    with (folder / "own.py").open("a") as file:
        file.write(_TELLS.format(names=("SLURMD_NODENAME", *variables)))
    return jobs


def told_by(jobs: Jobs, ranks: int = 4) -> list[dict[str, Any]]:
    return [json.loads((jobs.folder / f"where-{rank}.json").read_text()) for rank in range(ranks)]
