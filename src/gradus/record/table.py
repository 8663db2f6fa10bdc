"""Table: rows of named values, as `result.metrics` gives them; readable in a terminal and in a notebook."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, overload

from gradus.record.format import count_text, number_text
from gradus.schema.errors import InputError, unknown_name

_SHOWN_ROWS = 12  # longer tables show their first and last rows


class Table(Sequence[dict[str, Any]]):
    """Rows that do not change. `table[3]` is a row, `table[1:5]` a table, `table["loss"]` a column.

    A column has one value for each row, None where the row has none, so that columns can be read side by side.
    `table["step", "loss"]` is the table of these columns only.
    """

    __hash__ = None  # type: ignore[assignment]  # compared by its rows, as a list is

    def __init__(self, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
        self._rows = tuple(dict(row) for row in rows)
        self._columns = (
            tuple(columns) if columns is not None else tuple(dict.fromkeys(k for r in self._rows for k in r))
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns, in the order in which rows have them."""
        return self._columns

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> Table: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    @overload
    def __getitem__(self, key: tuple[str, ...]) -> Table: ...
    def __getitem__(self, key: int | slice | str | tuple[str, ...]) -> Any:
        if isinstance(key, str):
            self._check_column(key)
            return [row.get(key) for row in self._rows]
        if isinstance(key, tuple):
            for name in key:
                self._check_column(name)
            return Table([{name: row[name] for name in key if name in row} for row in self._rows], key)
        if isinstance(key, slice):
            return Table(self._rows[key], self._columns)
        return dict(self._rows[key])  # a copy: who changes it does not change the table

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (Table, list, tuple)) else NotImplemented

    def to_csv(self, path: str | Path) -> None:
        """Write all rows to a file; None is an empty field."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)

    def to_pandas(self) -> Any:
        """The same as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            raise InputError(
                "to_pandas: pandas is not installed here",
                hint="pip install pandas; without it, to_csv writes a file, and columns are plain lists",
            ) from None
        return pandas.DataFrame(list(self), columns=list(self._columns))

    def __repr__(self) -> str:
        header, lines, _ = self._shown()
        if not lines:
            return "Table: no rows"
        widths = [max(len(text) for text in column) for column in zip(header, *lines, strict=True)]
        return "\n".join(
            "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in (header, *lines)
        )

    def _repr_html_(self) -> str:
        header, lines, note = self._shown()
        if not lines:
            return "<em>no rows</em>"
        head = "".join(f"<th>{escape(name)}</th>" for name in header)
        body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in line) + "</tr>" for line in lines)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><small>{escape(note)}</small>"

    def _shown(self) -> tuple[tuple[str, ...], list[tuple[str, ...]], str]:
        """What people see: columns that hold something, and of a long table only both ends."""
        names = tuple(name for name in self._columns if any(row.get(name) is not None for row in self._rows))
        lines = [tuple(_text(row.get(name)) for name in names) for row in self._rows]
        if len(lines) > _SHOWN_ROWS:
            half = _SHOWN_ROWS // 2
            lines = [*lines[:half], ("…",) * len(names), *lines[-half:]]
        return names, lines, count_text(len(self), "row")

    def _check_column(self, name: str) -> None:
        if name not in self._columns:
            raise unknown_name("column", name, self._columns, field="metrics")


def _text(value: Any) -> str:
    if value is None:
        return ""
    return number_text(value) if isinstance(value, float) else str(value)
