"""The report of a run: everything that its files tell, and in words what they do not."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from report_runs import made_up_run

from gradus.diagnosis.report.run_report import RunReport
from gradus.record.directory import RunDirectory
from gradus.record.page_html import Head, Section


class Text(HTMLParser):
    """The words on a page, and what it could load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words, self.loads, self._hidden = "", [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self._hidden = tag in ("script", "style")
        values = dict(attributes)
        self.loads += [values[name] for name in ("src", "href") if values.get(name, "#")[0] not in "#d"]

    def handle_endtag(self, tag):
        self._hidden = False

    def handle_data(self, data):
        self.words += "" if self._hidden else data


def parts(run: RunDirectory) -> tuple[Head, dict[str, Section]]:
    head, sections = RunReport(run).parts()
    return head, {section.id: section for section in sections}


def facts(head: Head) -> dict[str, str]:
    return {fact.name: fact.value for fact in head.facts}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    return made_up_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def page(run) -> str:
    return RunReport(run).page()


def test_it_loads_nothing_from_anywhere(page):
    assert Text(page).loads == []
    assert not re.search(r"https?:|//\w+\.|@import|url\(", page)


def test_the_head_has_the_numbers_of_the_run(run):
    head, _ = parts(run)
    found = facts(head)
    assert (head.title, head.chip) == ("made-up/one", "finished")
    assert found["steps"] == "60 of 60"
    assert found["loss"] == "2.051"
    assert found["validation loss"] == "2.055"
    assert found["peak memory"] == "4 GiB"
    assert found["speed"] == "20.5 k tok/s"


def test_energy_is_from_the_counters_and_for_each_sample(run):
    found = facts(parts(run)[0])
    assert found["energy of the GPUs"] == "118 kJ"  # two GPUs, 59 differences of 1000 J
    assert found["energy a sample"] == "245.8 J"


def test_without_a_counter_energy_is_unavailable_and_never_zero(tmp_path):
    head, sections = parts(made_up_run(tmp_path, gpus=None))
    assert facts(head)["energy"] == facts(head)["energy a sample"] == "unavailable"
    assert "no NVIDIA driver" in sections["devices"].html
    assert "CPU utilisation" in sections["devices"].html


def test_every_section_has_a_chart_or_says_what_is_missing(page):
    sections = re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.S)
    assert len(sections) == 13
    for name, html in sections:
        assert re.search(r"<(figure|table|article|pre|li)|No finding", html) or 'class="missing"' in html, name
    assert not re.search(r"<figure(?:(?!</figure>).)*<svg[^>]*>\s*</svg>", page, re.S)


def test_all_that_happened_is_marked_in_the_charts(tmp_path):
    run = made_up_run(tmp_path, attempts=((1, 45), (41, 60)))
    _, sections = parts(run)
    loss = sections["training"].html
    assert 'data-label="checkpoint at step 20"' in loss
    assert 'data-label="resume at step 40 (attempt 2): goes on from step 40"' in loss
    assert 'data-label="fault: exception: a node &lt;died&gt;"' in loss
    assert "a node &lt;died&gt;" in sections["events"].html
    assert 'class="mark fault"' in sections["devices"].html
    assert "2 attempts" in parts(run)[0].subtitle
    assert sections["attempts"].html.count("<tr>") == 3


def test_a_slow_rank_is_named_with_its_node(tmp_path):
    _, sections = parts(made_up_run(tmp_path, ranks=4, slow_rank=2))
    assert "Rank 2 on n1 is the slowest: 130 ms" in sections["ranks"].html


def test_time_by_kind_is_a_total_and_over_the_run(run):
    _, sections = parts(run)
    html = sections["time"].html
    assert html.count('class="layer') == 6
    assert "backward: 50 ms (38.5%)" in html
    assert "backward 38%" in html


def test_throttling_is_told(run):
    assert "Clocks were held down in 25.0% of the samples: sw power cap." in parts(run)[1]["devices"].html


def test_how_to_reproduce_it_is_the_command_with_its_files(run):
    html = parts(run)[1]["reproduce"].html
    assert "gradus train recipe.yaml --set steps=60" in html
    assert "/somewhere" not in html
    assert "git checkout 0123abcd" in html
    assert "recipe.yaml of attempt 1" in html
    assert "-old &lt;line&gt;" in html


def test_a_run_of_an_older_version_says_what_it_lacks(tmp_path):
    run = made_up_run(tmp_path, timings=False, devices=False)
    _, sections = parts(run)
    assert "Time by kind was not measured" in sections["time"].html
    assert "Own time of ranks was not measured" in sections["ranks"].html
    assert "Devices were not sampled" in sections["devices"].html
    assert "<figure" in sections["training"].html
    assert "of rank 0" in str(parts(run)[0].facts)


def test_a_run_that_never_logged_a_step_has_a_page(tmp_path):
    run = RunDirectory.create(tmp_path, "dead", "one")
    head, sections = parts(run)
    assert facts(head)["loss"] == "unavailable"
    assert "No step was logged" in sections["training"].html
    assert "No attempt has begun yet." in sections["attempts"].html
    assert "<figure" not in RunReport(run).page()


def test_a_broken_last_line_is_normal_and_a_broken_one_before_it_is_told(tmp_path):
    run = made_up_run(tmp_path)
    with run.metrics_path.open("a") as file:
        file.write('{"step": 61, "att')
    assert "could not be read" not in RunReport(run).page()
    with run.metrics_path.open("a") as file:
        file.write('\n{"step": 61, "attempt": 1, "loss": 1.5}\n')
    assert "1 line of its files could not be read" in RunReport(run).page()
    assert facts(parts(run)[0])["loss"] == "1.5"


def test_a_loss_that_is_not_a_number_is_told_and_not_drawn(tmp_path):
    run = made_up_run(tmp_path)
    with run.metrics_path.open("a") as file:
        file.write('{"step": 61, "attempt": 1, "loss": "NaN"}\n')
    assert "training was not finite 1 times, first at step 61." in parts(run)[1]["training"].html


def test_what_people_wrote_is_text_and_no_markup(tmp_path):
    run = made_up_run(tmp_path)
    (run.attempt_path(1) / "recipe.yaml").write_text("name: <script>alert(1)</script>\n")
    page = RunReport(run).page()
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_report_that_is_kept_reads_only_what_is_new(tmp_path):
    run = made_up_run(tmp_path)
    report = RunReport(run)
    report.parts()
    read = report.history.logged_lines
    with run.metrics_path.open("a") as file:
        file.write('{"step": 61, "attempt": 1, "loss": 0.25}\n')
    head, _ = report.parts()
    assert report.history.logged_lines == read + 1
    assert facts(head)["loss"] == "0.25"


def test_the_same_run_twice_is_the_same_page(run):
    assert RunReport(run).page() == RunReport(run).page()
