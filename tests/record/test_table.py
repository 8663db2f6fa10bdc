import csv
import json
import sys

import pytest

from gradus.record.table import Table
from gradus.schema.errors import InputError

ROWS = [
    {"step": 1, "loss": 4.0, "mfu": None},
    {"step": 2, "loss": 3.123456789, "mfu": None, "validation_loss": 3.5},
    {"step": 3, "loss": 2.0, "mfu": None},
]


@pytest.fixture
def table():
    return Table(ROWS)


def test_it_can_be_used_as_the_list_of_its_rows(table):
    assert table == ROWS
    assert list(table) == ROWS
    assert len(table) == 3
    assert table[-1] == ROWS[-1]
    assert json.loads(json.dumps(table[0])) == ROWS[0]
    assert [row["loss"] for row in reversed(table)] == [2.0, 3.123456789, 4.0]
    assert Table([]) == []
    assert not Table([])


def test_a_column_has_a_value_for_each_row(table):
    assert table.columns == ("step", "loss", "mfu", "validation_loss")
    assert table["validation_loss"] == [None, 3.5, None]
    assert dict(zip(table["step"], table["loss"], strict=True)) == {1: 4.0, 2: 3.123456789, 3: 2.0}


def test_parts_of_a_table_are_tables(table):
    assert isinstance(table[1:], Table)
    assert table[1:] == ROWS[1:]
    assert table[:1].columns == table.columns
    assert table["step", "validation_loss"].columns == ("step", "validation_loss")
    assert table["step", "validation_loss"] == [{"step": 1}, {"step": 2, "validation_loss": 3.5}, {"step": 3}]


def test_nobody_changes_a_table_through_a_row(table):
    table[0]["loss"] = 0
    for row in table:
        row.clear()
    assert table == ROWS
    with pytest.raises(TypeError):
        table[0] = {}


def test_a_misspelt_column_names_the_nearest(table):
    with pytest.raises(InputError, match="did you mean 'validation_loss'"):
        table["validaton_loss"]
    with pytest.raises(InputError, match="did you mean 'loss'"):
        table["step", "los"]


def test_what_is_shown_is_short_and_leaves_out_empty_columns(table):
    assert repr(table).splitlines() == [
        "step   loss  validation_loss",
        "   1      4                 ",
        "   2  3.123              3.5",
        "   3      2                 ",
    ]
    assert "mfu" not in table._repr_html_()
    assert "<td>3.123</td>" in table._repr_html_()
    long = Table({"step": step, "note": "<b>"} for step in range(1000))
    assert len(repr(long).splitlines()) == 14
    assert "999" in repr(long)
    assert "…" in repr(long)
    assert "1000 rows" in long._repr_html_()
    assert "<b>" not in long._repr_html_()
    assert repr(Table([])) == "Table: no rows"


def test_csv_holds_everything(table, tmp_path):
    table.to_csv(tmp_path / "metrics.csv")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == table["loss"]
    assert [row["validation_loss"] for row in rows] == ["", "3.5", ""]


def test_without_pandas_the_error_says_what_to_do(table, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError) as caught:
        table.to_pandas()
    assert "pip install pandas" in caught.value.hint
