"""`gradus bench collectives`: a table of real ranks on this machine."""

from __future__ import annotations

import pytest
from gradus_command import Gradus


@pytest.mark.slow
def test_collectives_are_timed_and_right(tmp_path):
    done = Gradus(tmp_path)("bench", "collectives", "all-reduce", "broadcast", "--from", "64", "--to", "1024", "--json")
    assert done.code == 0, done.err
    assert [(row["operation"], row["bytes"]) for row in done.json["rows"]] == [
        (operation, size) for operation in ("all-reduce", "broadcast") for size in (64, 256, 1024)
    ]
    assert done.json["wrong"] == 0
    assert all(row["seconds"] > 0 and row["ranks"] == 2 for row in done.json["rows"])


def test_an_unknown_operation_is_bad_input(tmp_path):
    done = Gradus(tmp_path)("bench", "collectives", "all-reduse", "--json")
    assert done.code == 2
    assert done.json["error"]["nearest"] == "all-reduce"
