"""The table "On Slurm" of docs/reliability.md, from really doing what it speaks of (tests/slurm/recovery_cases.py).

python benchmarks/recovery_table.py [--write] [--only NAME]

It needs root and Debian's slurm-wlm, as the tests do. With --only, the other lines of the table stay as they are.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
import traceback
from datetime import date
from pathlib import Path

from case_table import ROOT, CaseTable, asked_for

HEAD = (
    "| fault | what is done | what happens | took | seconds to the first new step | steps computed again |\n"
    "|---|---|---|---|---|---|"
)


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from slurm.lab import Lab
    from slurm.recovery_cases import CASES, Ground

    given, table = asked_for(CASES, __doc__), CaseTable("on slurm", HEAD)
    began, loads, failed = time.monotonic(), [], False
    with tempfile.TemporaryDirectory() as folder, Lab() as lab:
        ground = Ground(lab, Path(folder))
        version = lab.run("sinfo", "--version").strip()
        for name in given.only or CASES:
            loads.append(_others_load())
            try:
                found = CASES[name].case(ground)
            except Exception as error:
                failed = True
                print(f"FAILED: {name}", *traceback.format_exception(error), sep="\n", flush=True)
                continue
            finally:
                lab.clear()
            seconds = "–" if found.seconds is None else f"{found.seconds:.1f}"
            lost = "–" if found.lost is None else found.lost
            row = table.put(name, CASES[name].done, found.happened, found.attempts_and_jobs, seconds, lost)
            print(f"{row}   after {time.monotonic() - began:.0f} s, load {loads[-1]:.1f}", flush=True)
    if given.write:  # the line of a case that failed stays as it was
        table.write(CASES, "", _measured(version, loads))
    if failed:
        raise SystemExit(1)


def _others_load() -> float:
    """What else the machine was doing just before a case: processes that want a core, on average over a minute."""
    return os.getloadavg()[0]


def _measured(version: str, loads: list[float]) -> str:
    import torch

    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return (
        f"Measured {date.today():%Y-%m-%d}: {version}, torch {torch.__version__}, all nodes on one machine with "
        f"{os.cpu_count()} cores ({cpu[1] if cpu else 'unknown'}); its load before each case was {min(loads):.1f} to "
        f"{max(loads):.1f}, the cases before included."
    )


if __name__ == "__main__":
    main()
