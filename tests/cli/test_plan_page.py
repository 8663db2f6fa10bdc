"""`gradus plan --json --html`: one document and one page, and a browser shows the numbers of the document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import browser
import pytest
import yaml
from gradus_command import Gradus
from plan_page_contents import Contents

from gradus.planner.shown import gib_text, seconds_text
from gradus.schema.plan import Plan
from gradus.schema.prediction import Prediction

SITE = {"name": "site", "nodes": 2, "gpus_per_node": 4, "gpu": "H100-SXM", "cpu_cores": 64, "memory_gib": 512}
GPT = {
    "model": {"use": "gpt", "layers": 2, "width": 64, "heads": 2, "context": 64},
    "data": {"use": "synthetic-tokens"},
    "batch": 32,
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    gradus = Gradus(tmp_path_factory.mktemp("page"))
    gradus.recipe("gpt.yaml", **GPT)
    (gradus.folder / "site.yaml").write_text(yaml.safe_dump(SITE))
    page = gradus.folder / "plans.html"
    done = gradus("plan", "gpt.yaml", "--cluster", "site.yaml", "--gpus", "4", "--json", "--html", page.name)
    assert done.code == 0, done.err
    return done.json, page


def test_the_document_is_complete(planned):
    document, _ = planned
    assert set(document) == {"choices", "refused"}
    assert len(document["choices"]) > 1
    for choice in document["choices"]:
        Plan.model_validate(choice["plan"])
        found = choice["prediction"]
        for part in ("memory", "host_memory"):
            kinds = {name: amount for name, amount in found[part].items() if name != "peak"}
            assert found[part]["peak"] == sum(kinds.values())
        kinds = {name: amount for name, amount in found["step"].items() if name != "overlapped_communication"}
        assert kinds.pop("total") == pytest.approx(sum(kinds.values()))
        assert set(Prediction.model_fields) == set(found)
        assert found["budget"]["steps"] == 6
        assert found["verdict"] in ("fits", "tight")
        assert found["basis"]


@browser.needed
def test_a_browser_shows_the_numbers_of_the_document(planned):
    document, page = planned
    contents = Contents(browser.content(page))
    assert len(contents.rows) == 1 + len(document["choices"])
    assert contents.loads == []
    for number, choice in enumerate(document["choices"], 1):
        found = choice["prediction"]
        memory, step = (" ".join(contents.charts[f"plan-{number} {name}"]) for name in ("memory", "step"))
        amounts = [amount for name, amount in found["memory"].items() if amount and name != "peak"]
        assert all(f": {gib_text(amount)}" in memory for amount in amounts)
        assert all(f": {seconds_text(seconds)}" in step for seconds in found["step"].values() if seconds)
        assert seconds_text(found["step"]["total"]) in contents.rows[number]
        assert all(sentence in contents.text for sentence in found["basis"])
    assert all(entry["reason"] in contents.text for entry in document["refused"])
