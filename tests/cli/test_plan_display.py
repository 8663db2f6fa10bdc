"""The terminal shows the ranked plans, and what it writes to a file is still a plan."""

from __future__ import annotations

import io
import re

import yaml
from predicted_choices import CHOICES, REFUSED, prediction

from gradus.cli.plan_display import show_plans
from gradus.planner.defaults import Choice
from gradus.schema.plan import Plan


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def shown(choices=CHOICES, refused=REFUSED) -> str:
    stream = io.StringIO()
    show_plans(choices, refused, stream)
    return stream.getvalue()


def on_a_terminal(monkeypatch, columns: int, encoding: str = "utf-8") -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    stream.encoding = encoding
    show_plans(CHOICES, REFUSED, stream)
    return stream.getvalue()


def test_a_file_is_a_plan_with_everything_else_in_comments():
    text = shown()
    assert Plan.model_validate(yaml.safe_load(text)) == CHOICES[0].plan
    assert "# 16 replicas of <8 slices>" in text
    assert "\x1b" not in text


def test_all_that_is_known_is_there():
    text = shown()
    for words in (
        "# 2  replicate 2 × pipeline 4 × shard 8 × tensor 2, interleaved ×2",
        "92,444",
        "# Memory of the rank that needs most: 65.0 of 80.0 GiB, fits (±5%, 15.0 GiB left); peak in: backward of block",
        "Host memory of a node: 2.00 GiB (loading 2.00 GiB)",
        "# Time of a step: 1.6 s",
        "hidden communication",
        "with checkpoints and failures 1 d 22:13:20: goodput 96.2%",
        "# What this rests on\n#   Traced as CUDA would run it.",
        "# Not chosen\n#   replicate 128: needs 143 GiB of 80: optimizer 96",
    ):
        assert words in text, words


def test_bars_begin_where_the_last_one_ended_and_the_limit_is_marked():
    lines = [line for line in shown().splitlines() if "│" in line]
    assert len({line.index("│") for line in lines}) == 1, "one vertical line"
    begins = [next(i for i, c in enumerate(line) if c in "▏▎▍▌▋▊▉█") for line in lines]
    assert begins[:-1] == sorted(begins[:-1])
    assert begins[-1] == begins[0], "the peak is the whole"
    beyond = [line for line in shown([Choice(Plan(), {}, prediction(79))]).splitlines() if "│" in line]
    assert "█" in beyond[-1].partition("│")[2], "what does not fit lies beyond the limit"


def test_a_narrow_terminal_loses_columns_and_keeps_its_width(monkeypatch):
    wide, narrow = on_a_terminal(monkeypatch, 200), on_a_terminal(monkeypatch, 72)
    assert "cost" in wide.splitlines()[0]
    assert "cost" not in narrow.splitlines()[0]
    assert "A wider terminal" in narrow
    assert "A wider terminal" not in wide
    table = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in narrow.splitlines()[:6]]
    assert max(map(len, table)) <= 72
    assert table[0].split() == ["plan", "memory", "step", "zero"], "the others are left out, not broken"
    assert [line[:3] for line in table] == ["   ", "1  ", "2  ", "   ", "   ", "3  "]
    assert "\x1b[33m" in wide, "what is tight is yellow"


def test_a_terminal_without_blocks_gets_plain_characters(monkeypatch):
    text = on_a_terminal(monkeypatch, 120, "latin-1")
    assert "###" in text
    assert text.encode("latin-1")


def test_without_a_prediction_there_is_the_plan_alone():
    text = shown([Choice(Plan(), {"mesh": "one rank"})], [])
    assert text == Plan().to_yaml({"mesh": "one rank"})


def test_a_device_of_unknown_speed_has_memory_but_no_time():
    text = shown([Choice(Plan(), {}, prediction(step=None, mfu=None, budget=None))])
    assert "Memory of the rank" in text
    assert "No time of a step is predicted, see below for why; --measure measures it." in " ".join(text.split())
