"""The table of docs/reliability.md, from really doing what it speaks of (tests/reliability_cases.py).

python benchmarks/reliability_table.py [--write] [--only NAME]

With --only, the other lines of the table stay as they are.
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from pathlib import Path

from case_table import ROOT, CaseTable, asked_for

HEAD = "| fault | what is done | what happens | resumed from step | steps lost |\n|---|---|---|---|---|"


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from reliability_cases import CASES, outcomes
    from reliability_place import Place

    given, table = asked_for(CASES, __doc__), CaseTable("table", HEAD)
    began = time.monotonic()
    failed = False
    names = given.only or list(CASES)
    with tempfile.TemporaryDirectory() as folder, outcomes(Place(Path(folder)), names) as under_way:
        for name, future in under_way.items():
            error = future.exception()
            if error is not None:
                failed = True
                print(f"FAILED: {name}", *traceback.format_exception(error), sep="\n", flush=True)
                continue
            found = future.result()
            row = table.put(name, CASES[name].done, found.happened, found.resumed, found.lost)
            print(f"{row}   after {time.monotonic() - began:.0f} s", flush=True)
    if failed:
        raise SystemExit(1)
    if given.write:
        table.write(CASES)


if __name__ == "__main__":
    main()
