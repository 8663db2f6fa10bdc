"""The table of docs/parallelism.md, from the tests themselves: every configuration with what was measured.

python benchmarks/parallelism_table.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "parallelism.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
TESTS = "tests/multiprocess/test_configurations.py"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", TESTS],
            cwd=ROOT,
            env={**os.environ, "GRADUS_CONFIGURATIONS": str(results)},
            check=False,
        )
        if done.returncode:
            return done.returncode
        rows = json.loads(results.read_text())
    page = PAGE.read_text()
    table = f"{BEGIN}\n{formatted(rows)}\n{END}"
    PAGE.write_text(re.sub(rf"{BEGIN}.*{END}", lambda _: table, page, flags=re.DOTALL))
    return 0


def formatted(rows: list[dict[str, object]]) -> str:
    lines = ["| configuration | model | ranks | loss | gradient norm | weights |", "|---|---|---|---|---|---|"]
    lines += [
        "| {name} | {model} | {ranks} | {loss:.0e} | {grad_norm:.0e} | {weights:.0e} |".format(**row) for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
