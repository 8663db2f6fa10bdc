"""The page of ranked plans: one file, with the numbers of the JSON document, that can be sorted and looked into."""

from __future__ import annotations

import re
from pathlib import Path

import browser
import pytest
from plan_page_contents import Contents
from predicted_choices import CHOICES, GIB, REFUSED

from gradus.planner.defaults import Choice
from gradus.planner.page import plan_page
from gradus.planner.shown import cells, gib_text, seconds_text
from gradus.schema.plan import Plan


def page() -> str:
    return plan_page("gpt on site", "128 GPUs", CHOICES, REFUSED)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "plans.html").write_text(page())
    return tmp_path / "plans.html"


def test_it_loads_nothing_from_anywhere():
    assert Contents(page()).loads == []
    assert not re.search(r"https?:|//\w|@import|url\(", page())


def test_it_has_a_row_for_each_plan_and_every_number_of_the_document():
    contents = Contents(page())
    assert contents.rows[0] == ["#", *cells(CHOICES[0])]
    assert contents.rows[1:] == [[str(n), *cells(choice).values()] for n, choice in enumerate(CHOICES, 1)]
    for number, choice in enumerate(CHOICES, 1):
        document = choice.prediction.document()
        memory = " ".join(contents.charts[f"plan-{number} memory"])
        amounts = [amount for name, amount in document["memory"].items() if amount and name != "peak"]
        assert all(f": {gib_text(amount)}" in memory for amount in amounts)
        assert f"peak: {document['memory']['peak'] / GIB:.1f} of 80.0 GiB" in memory
        step = " ".join(contents.charts[f"plan-{number} step"])
        assert all(f": {seconds_text(seconds)}" in step for seconds in document["step"].values() if seconds)
    for words in ("replicate 128", "needs 143 GiB of 80", "Traced as CUDA would run it.", "goodput 96.2%"):
        assert words in contents.text


def test_what_people_wrote_is_text_and_no_markup():
    assert "16 replicas of &lt;8 slices&gt;" in page()
    hostile = plan_page("<script>alert(1)</script>", "", [Choice(Plan(), {"mesh": "<img src=x>"})], [])
    contents = Contents(hostile)
    assert "<script>alert(1)</script>" in contents.text
    assert contents.loads == []


def test_plans_without_a_prediction_have_a_page_too():
    contents = Contents(plan_page("laptop", "", [Choice(Plan(), {"mesh": "one rank"})]))
    assert contents.rows[1][:2] == ["1", "1 rank"]
    assert contents.charts == {}


@browser.needed
def test_a_browser_shows_the_best_plan_first(file):
    contents = Contents(browser.content(file))
    assert contents.shown == ["plan-1"]
    assert contents.rows == Contents(page()).rows


@browser.needed
def test_a_click_on_a_row_shows_its_plan(file):
    contents = Contents(browser.content(file, "document.querySelectorAll('#plans tbody tr')[2].click()"))
    assert contents.shown == ["plan-3"]


@browser.needed
@pytest.mark.parametrize(
    ("column", "clicks", "order"), [("step", 1, "132"), ("step", 2, "231"), ("memory", 1, "312"), ("plan", 2, "321")]
)
def test_a_click_on_a_heading_sorts_by_number(file, column, clicks, order):
    find = f"[...document.querySelectorAll('#plans thead button')].find(b => b.textContent === '{column}')"
    contents = Contents(browser.content(file, f"for (let i = 0; i < {clicks}; i++) {find}.click()"))
    assert "".join(row[0] for row in contents.rows[1:]) == order
