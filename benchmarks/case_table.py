"""A table of docs/reliability.md that is made of cases, each a row: all, or those that are asked for by name."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"


def asked_for(cases: Collection[str], description: str | None) -> argparse.Namespace:
    """What was typed: `write`, and the names in `only`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    parser.add_argument("--only", action="append", choices=list(cases), metavar="NAME", help="a case by its name")
    return parser.parse_args()


@dataclass
class CaseTable:
    """The rows between two marks of the page, by the case in their first column. Rows that are not replaced stay."""

    name: str  # of the marks
    head: str
    rows: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        _, table, _ = self._page()
        known = [line for line in table.splitlines() if line.startswith("| ")]
        self.rows = {line.split("|")[1].strip(): line for line in known}

    def put(self, name: str, *cells: object) -> str:
        self.rows[name] = f"| {' | '.join(str(cell) for cell in (name, *cells))} |"
        return self.rows[name]

    def write(self, cases: Collection[str], *below: str) -> None:
        before, _, after = self._page()
        lines = [self.head, *(self.rows[name] for name in cases if name in self.rows), *below]
        PAGE.write_text(f"{before}{self._mark('begin')}\n" + "\n".join(lines) + f"\n{self._mark('end')}{after}")

    def _page(self) -> tuple[str, str, str]:
        before, _, rest = PAGE.read_text().partition(self._mark("begin"))
        table, _, after = rest.partition(self._mark("end"))
        return before, table, after

    def _mark(self, which: str) -> str:
        return f"<!-- {self.name}: {which} -->"
