"""Comparing runs: speed-up against a baseline, what can be split, what differs, and a law where there is one."""

from __future__ import annotations

import re

import pytest
from report_runs import made_up_run

from gradus.diagnosis.report.comparison import Comparison, compare
from gradus.diagnosis.report.comparison_page import comparison_page
from gradus.diagnosis.scaling_law import Refused, ScalingLaw
from gradus.record.amdahl import Amdahl
from gradus.record.directory import RunDirectory
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan

RATES = {1: 80.0, 2: 155.2, 4: 296.0, 8: 520.0}


@pytest.fixture(scope="module")
def scaling(tmp_path_factory) -> Comparison:
    root = tmp_path_factory.mktemp("runs")
    return compare([made_up_run(root, f"gpus-{n}", ranks=n, gpus=n, rate=rate) for n, rate in RATES.items()])


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """Runs whose models have more and more parameters, and whose losses follow a law."""
    root = tmp_path_factory.mktemp("runs")

    def run(size: float, **more):
        name = f"p{size:.0f}"
        settings = {"floor": 1.6 + 300 * size**-0.35, "parameters": int(size), "width": 64 + len(name)}
        return made_up_run(root, f"{name}-{len(list(root.glob('*/*')))}", **{**settings, "devices": False, **more})

    return run


def test_speed_up_and_efficiency_are_against_the_first_run(scaling):
    times = [round(found, 2) for found, _ in scaling.speed_ups()]
    shares = [round(share, 3) for _, share in scaling.speed_ups()]
    assert times == [1.0, 1.94, 3.7, 6.5]
    assert shares == [1.0, 0.97, 0.925, 0.812]


def test_amdahl_has_its_interval(scaling):
    assert scaling.amdahl.fraction == pytest.approx(0.967, abs=2e-3)
    assert scaling.amdahl.low < 0.967 < scaling.amdahl.high


def test_the_page_has_a_row_and_a_line_for_each_run(scaling):
    page = comparison_page(scaling)
    assert re.findall(r"<td>(gpus-\d)</td>", page) == ["gpus-1", "gpus-2", "gpus-4", "gpus-8"]
    loss = re.search(r"<figcaption>Training loss</figcaption>.*?</figure>", page, re.S)[0]
    assert re.findall(r'class="line c(\d)" data-label="(gpus-\d)"', loss) == [
        (str(at), f"gpus-{2**at}") for at in range(4)
    ]
    assert "6.50 ×" in page
    assert "Amdahl fraction 0.967 (" in page
    assert not re.search(r"https?:|//\w+\.|@import|url\(", page)


def test_only_what_differs_is_listed(scaling):
    assert set(scaling.differences) == {"plan.mesh.replicate", "plan.micro_batch"}
    assert scaling.differences["plan.mesh.replicate"] == (1, 2, 4, 8)


def test_the_document_has_the_numbers_of_the_page(scaling):
    document = scaling.document()
    assert document["baseline"] == "gpus-1"
    assert document["runs"][3]["speed_up"] == pytest.approx(6.5)
    assert document["amdahl"]["fraction"] == scaling.amdahl.fraction
    assert "refused" in document["scaling_law"]


def test_one_number_of_gpus_gives_no_amdahl_fraction_and_says_why(tmp_path):
    found = compare([made_up_run(tmp_path, "a"), made_up_run(tmp_path, "b", rate=100.0)])
    assert isinstance(found.amdahl, Refused)
    assert (
        "No Amdahl fraction: it needs runs on different numbers of GPUs or ranks, and all have 2."
        in comparison_page(found)
    )
    assert found.speed_ups()[1][0] == pytest.approx(1.25)


def test_faster_than_ideal_has_a_speed_up_but_no_amdahl_fraction(tmp_path):
    found = compare([made_up_run(tmp_path, f"n{n}", ranks=n, gpus=n, rate=rate) for n, rate in ((1, 80.0), (2, 560.0))])
    assert found.speed_ups()[1][0] == pytest.approx(7.0)
    assert "faster than ideal" in found.document()["amdahl"]["refused"]
    page = comparison_page(found)
    assert "No Amdahl fraction: 2 are 7.00 times as fast as 1" in page
    assert "Amdahl's law" not in page
    assert "<figcaption>Speed-up" in page


def test_other_work_on_more_gpus_has_no_amdahl_fraction_and_names_what_differs(tmp_path):
    one = made_up_run(tmp_path, "one", ranks=1, gpus=1, batch=8)
    two = made_up_run(tmp_path, "two", ranks=2, gpus=2, batch=10, rate=150.0, width=128)
    _set_workers(two, 2, by_the_recipe=True)
    found = compare([one, two])
    reason = found.document()["amdahl"]["refused"]
    assert all(key in reason for key in ("recipe.model.width", "plan.workers", "recipe.batch"))
    assert found.speed_ups()[1][0] == pytest.approx(1.875)
    assert any("plan.workers" in doubt for doubt in found.doubts())


def test_workers_that_the_planner_chose_by_the_ranks_are_no_other_work(tmp_path):
    runs = [made_up_run(tmp_path, f"n{n}", ranks=n, gpus=n, rate=75.0 * n) for n in (1, 2)]
    _set_workers(runs[0], 7, by_the_recipe=False)
    _set_workers(runs[1], 3, by_the_recipe=False)
    found = compare(runs)
    assert "plan.workers" in found.differences
    assert isinstance(found.amdahl, Amdahl)


def test_recomputing_other_blocks_is_other_work(tmp_path):
    runs = [made_up_run(tmp_path, f"n{n}", ranks=n, gpus=n, rate=75.0 * n) for n in (1, 2)]
    for blocks, run in zip((2, 1), runs, strict=True):
        plan = run.attempt_path(1) / "plan.yaml"
        recomputing = Plan.load(plan).model_copy(update={"recompute": "full", "recompute_blocks": blocks})
        plan.write_text(recomputing.to_yaml())
    assert "plan.recompute_blocks" in compare(runs).document()["amdahl"]["refused"]


def _set_workers(run: RunDirectory, workers: int, *, by_the_recipe: bool) -> None:
    plan, recipe = run.attempt_path(1) / "plan.yaml", run.attempt_path(1) / "recipe.yaml"
    plan.write_text(plan.read_text().replace("workers: 0", f"workers: {workers}"))
    if by_the_recipe:
        recipe.write_text(f"{recipe.read_text()}plan: {{workers: {workers}}}\n")


def test_a_batch_that_grows_with_the_gpus_has_an_amdahl_fraction(tmp_path):
    found = compare(
        [made_up_run(tmp_path, f"n{n}", ranks=n, gpus=n, batch=8 * n, rate=80.0 * n**0.9) for n in (1, 2, 4)]
    )
    assert 0.9 < found.amdahl.fraction < 1
    assert "weak scaling" in " ".join(found.doubts())


def test_different_models_make_a_speed_up_doubtful(tmp_path):
    runs = [made_up_run(tmp_path, "a", ranks=1, gpus=1), made_up_run(tmp_path, "b", ranks=2, batch=16, width=128)]
    said = " ".join(compare(runs).doubts())
    assert "The models differ" in said


def test_a_run_without_steps_gives_no_speed_up_but_a_page(tmp_path):
    runs = [made_up_run(tmp_path, "a"), made_up_run(tmp_path, "b", attempts=((1, 0),), timings=False)]
    found = compare(runs)
    assert found.rate is None
    assert found.speed_ups() == [(None, None), (None, None)]
    assert "No speed-up" in comparison_page(found)


def test_the_same_run_twice_is_refused(tmp_path):
    run = made_up_run(tmp_path)
    with pytest.raises(InputError, match="named twice"):
        compare([run, run])


def test_losses_over_model_size_give_their_law(sizes):
    found = compare([sizes(parameters) for parameters in (1e6, 4e6, 1.6e7, 6.4e7, 2.5e8)])
    assert isinstance(found.law, ScalingLaw)
    assert found.law.over == "parameters"
    assert found.law.exponent == pytest.approx(0.35, rel=0.02)
    page = comparison_page(found)
    assert "Loss and size" in page
    assert "exponent" in page


def test_losses_over_data_give_a_law_over_tokens(sizes):
    runs = [sizes(1e6, tokens=tokens, floor=1.5 + 90 * (480 * tokens) ** -0.4) for tokens in (64, 256, 1024, 4096)]
    law = compare(runs).law
    assert isinstance(law, ScalingLaw)
    assert (law.over, round(law.exponent, 2)) == ("tokens", 0.4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([{}, {}, {}], "3 different sizes"),
        ([{}, {}, {}, {"state": "stopped"}], "is stopped"),
        ([{}, {}, {}, {"tokens": 1024}], "both the model and the number of tokens differ"),
        ([{}, {}, {}, {"parameters": None}], "not all runs say how many parameters"),
        ([{}, {}, {}, {"floor": 99.0}], "does not fall"),
    ],
)
def test_runs_that_allow_no_law_are_refused_with_the_reason(sizes, changes, reason):
    found = compare([sizes(1e6 * 8**at, **change) for at, change in enumerate(changes)])
    assert isinstance(found.law, Refused)
    assert reason in found.law.reason
    assert f"No scaling law: {found.law.reason}" in comparison_page(found)
