"""The report in a real browser: on a desk, on a phone, in the dark and on paper, without a word in the console."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import browser
import pytest
from report_runs import made_up_run

from gradus.diagnosis.report.comparison import compare
from gradus.diagnosis.report.comparison_page import comparison_page
from gradus.diagnosis.report.run_report import RunReport
from gradus.record.directory import RunDirectory

pytestmark = browser.needed

PICTURES = Path(__file__).parents[3] / "docs" / "pictures"
# What a reader would see: whether anything sticks out, whether each drawing has something in it that has a colour.
LOOK = """
const all = (what, where = document) => [...where.querySelectorAll(what)];
const style = one => getComputedStyle(one), body = () => style(document.body);
const tip = () => document.querySelector(".tip").innerText;
const shapes = one => all("path.line, path.layer, path.dots, rect, path[class^=h]", one);
function seen(one) {
  const box = one.getBoundingClientRect(), { stroke, fill, visibility } = style(one);
  return box.width + box.height > 0 && (stroke !== "none" || fill !== "none") && visibility === "visible";
}
function point(area, across) {
  const box = area.getBoundingClientRect(), clientX = box.left + across * (box.width - 2);
  area.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX, clientY: box.top + 2 }));
  return tip();
}
const drawings = all("figure svg"), strip = document.querySelector("figure.heat .area");
const report = {
  width: innerWidth,
  page: document.documentElement.scrollWidth,
  drawings: drawings.length,
  empty: drawings.filter(one => !shapes(one).some(seen)).map(one => one.querySelector("title").textContent),
  small: all("figure .y-ticks span, figure .x-ticks span").filter(one => parseFloat(style(one).fontSize) < 11).length,
  background: body().backgroundColor,
  ink: body().color,
  tip: point(document.querySelector("figure.lines .area"), 0.5),
  cell: strip ? point(strip, 1) : "",
};
document.querySelector(".theme").click();
report.other = body().backgroundColor;
const told = document.createElement("pre");
told.id = "told";
told.textContent = JSON.stringify(report);
document.body.append(told);
"""


def look(page: Path, **window: object) -> dict[str, object]:
    found = browser.opened(page, LOOK, **window)
    assert found.console == []
    return json.loads(unescape(re.search(r'<pre id="told">(.*?)</pre>', found.document, re.S)[1]))


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    run = made_up_run(folder, ranks=4, attempts=((1, 45), (41, 60)), slow_rank=1, steps=60)
    (folder / "report.html").write_text(RunReport(run).page())
    return folder / "report.html"


@pytest.mark.parametrize("width", [1280, 375])
def test_nothing_sticks_out_and_every_chart_shows_something(page, width):
    found = look(page, width=width)
    assert found["width"] == width
    assert found["page"] <= width
    assert found["drawings"] > 15
    assert found["empty"] == []
    assert found["small"] == 0


def test_the_pointer_reads_values_and_the_button_turns_the_light_off(page):
    found = look(page)
    assert re.match(
        r"step 30\s+training 2\.40\d\s+validation 2\.79\d* at 20|step 30\s+training 2\.40\d\s+validation 2\.20\d at 40",
        found["tip"],
    )
    assert re.match(r"step 60\s+rank 0 0\.1$", found["cell"])
    assert luminance(found["background"]) > 0.8
    assert luminance(found["other"]) < 0.05


def test_in_the_dark_it_is_dark_and_can_be_read(page):
    found = look(page, dark=True)
    light, dark = luminance(found["ink"]), luminance(found["background"])
    assert dark < 0.05
    assert (light + 0.05) / (dark + 0.05) > 7
    assert found["empty"] == []


def test_it_can_be_printed(page, tmp_path):
    browser.printed(page, tmp_path / "report.pdf")
    paper = (tmp_path / "report.pdf").read_bytes()
    assert paper.startswith(b"%PDF")
    assert paper.count(b"/Type /Page\n") + paper.count(b"/Type /Page ") + paper.count(b"/Type /Page/") >= 2


def test_without_scripts_everything_but_the_pointer_is_there(page, tmp_path):
    bare = tmp_path / "bare.html"
    bare.write_text(re.sub(r"<script>.*?</script>", "", page.read_text(), flags=re.S))
    found = browser.opened(bare)
    assert found.console == []
    assert found.document.count("<svg") == page.read_text().count("<svg")


@pytest.mark.parametrize("width", [1280, 375])
def test_a_comparison_fits_too(tmp_path, width):
    runs = [made_up_run(tmp_path, f"on-{n}", ranks=n, gpus=n, rate=80.0 * n**0.9) for n in (1, 2, 4)]
    (tmp_path / "comparison.html").write_text(comparison_page(compare(runs)))
    found = look(tmp_path / "comparison.html", width=width)
    assert found["page"] <= width
    assert found["empty"] == []


@pytest.mark.slow
def test_the_report_of_a_real_run_is_complete_and_its_pictures_are_taken(tmp_path):
    """Two real ranks train a small model; with GRADUS_PICTURES=1 the pictures of the documentation are made of it."""
    for name, ranks, steps in (("one", 1, 40), ("two", 2, 100)):
        _train(tmp_path, name, ranks, steps)
    runs = [RunDirectory.open(name, tmp_path / "runs") for name in ("one", "two")]
    report, comparison = tmp_path / "report.html", tmp_path / "comparison.html"
    report.write_text(RunReport(runs[1]).page())
    comparison.write_text(comparison_page(compare(runs)))
    for page in (report, comparison):
        assert page.stat().st_size < 1_000_000
        for width in (1280, 375):
            found = look(page, width=width)
            assert found["page"] <= width
            assert found["empty"] == []
    text = report.read_text()
    for what in (
        "Mean step by kind",
        "Own time by rank",
        "CPU utilisation",
        "Validation loss",
        "checkpoint at step 50",
    ):
        assert what.lower() in text.lower(), what
    if os.environ.get("GRADUS_PICTURES") == "1":
        PICTURES.mkdir(exist_ok=True)
        browser.pictured(report, PICTURES / "report.png", height=2600)
        browser.pictured(report, PICTURES / "report-dark.png", height=1500, dark=True)
        browser.pictured(report, PICTURES / "report-phone.png", width=375, height=1600)
        browser.pictured(comparison, PICTURES / "compare.png", height=1900)


def _train(folder: Path, run_id: str, ranks: int, steps: int) -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
    settings = {"steps": steps, "batch": 16, "model.layers": 2, "model.width": 96, "model.context": 128}
    settings |= {"log_every": 2, "checkpoint.every": 50, "evaluate.every": 20, "evaluate.batches": 2}
    command = [sys.executable, "-m", "gradus", "train", str(recipe), "--nproc", str(ranks), "--run-id", run_id]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
