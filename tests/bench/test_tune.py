"""Tuning keeps what helps, tells each step, and loses nothing when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tried_models
import yaml
from gradus_command import Gradus
from tried_models import recipe_document
from typer.testing import CliRunner

from gradus.bench.tried import Ranks, Trial, Tried
from gradus.bench.tune import Tuned, Tuner
from gradus.bench.tune_knobs import KNOBS, Standing, candidates, ordered
from gradus.cli.main import app
from gradus.planner.defaults import Choice
from gradus.planner.resolve import resolved
from gradus.schema.cluster import Cluster
from gradus.schema.errors import GradusError
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe

HERE = Path(tried_models.__file__).parent
GIB = 2**30


def gpt(*overrides: str) -> Recipe:
    document = {
        "name": "gpt",
        "model": {"use": "gpt", "layers": 2, "width": 32, "heads": 2, "context": 16},
        "data": {"use": "synthetic-tokens"},
        "batch": 64,
        "steps": 10,
        "optimizer": {"use": "adamw", "lr": 1e-3},
    }
    return resolved(Recipe.from_document(document, overrides=list(overrides)))


def cluster(gpus: int = 1) -> Cluster:
    return Cluster(name="pretended", gpus_per_node=gpus, gpu="H200" if gpus else None, cpu_cores=16, memory_gib=64)


class PretendedGpu(Ranks):
    """A device that nobody here has: how fast it is, and what fits, follows from the plan."""

    def __init__(self, rate: Callable[[Plan], float], fits: Callable[[Plan], bool] = lambda plan: True) -> None:
        super().__init__(1)
        self.rate, self.fits = rate, fits
        self.tried: list[Plan] = []
        self.interrupt_at: int | None = None
        self.loss: Callable[[Plan], float] = lambda plan: 2.0

    def try_out(self, trial: Trial) -> Tried:
        self.tried.append(trial.plan)
        if self.interrupt_at is not None and len(self.tried) >= self.interrupt_at:
            raise KeyboardInterrupt
        if not self.fits(trial.plan):
            return Tried("out-of-memory", "as planned")
        seconds = trial.recipe.batch / self.rate(trial.plan)
        losses = (self.loss(trial.plan),) * 10
        return Tried("measured", "", trial.recipe.batch, (seconds,) * 5, seconds / 10, GIB, losses, device="pretended")


class SlowTrials(PretendedGpu):
    """Each trial takes its time, by a clock of its own."""

    clock = 0.0

    def try_out(self, trial: Trial) -> Tried:
        self.clock += 4.5
        return replace(super().try_out(trial), seconds=4.5)


def start(**changes: Any) -> Choice:
    plan = Plan(micro_batch=8, accumulate=8, precision="bf16", compile=True, workers=2)
    return Choice(plan.model_copy(update=changes), {"workers": "a guess"})


def tuned(
    ranks: Ranks, choice: Choice | None = None, recipe: Recipe | None = None, *, minutes: float = 60, **options: Any
) -> Tuned:
    tuner = Tuner(recipe or gpt(), choice or start(), cluster(), ranks, say=lambda text: None, minutes=minutes)
    return tuner.tuned(**{"look": False, **options})


def test_each_gain_is_kept_and_their_product_is_told_beside_what_was_measured() -> None:
    def rate(plan: Plan) -> float:
        faster = {0: 1.0, 1: 1.2, 2: 1.3, 4: 1.5, 8: 1.4}.get(int(plan.workers), 1.0)
        return 100 * faster * (2.0 if plan.micro_batch == 16 else 1.0) * (1.0 if plan.compile else 0.5)

    found = tuned(PretendedGpu(rate))
    assert found.changes == {"micro_batch": 16, "accumulate": 4, "workers": 4}
    assert [(step.knob, step.kept) for step in found.steps if step.factor] == [
        ("workers", True),
        ("micro_batch", True),
        ("compile", False),
        ("narrow_weights", False),
        ("loss_chunks", False),
    ]
    assert found.composed == pytest.approx(1.5 / 1.3 * 2)
    assert found.measured == pytest.approx(found.composed)
    assert found.reasons["workers"] == "measured: 1.15× over workers 2"
    assert "not faster with off" in found.reasons["compile"]
    found.plan.check(64, 1)


def test_the_largest_micro_batch_is_found_but_only_kept_if_it_is_the_fastest() -> None:
    found = tuned(PretendedGpu(lambda plan: 100.0, fits=lambda plan: plan.micro_batch <= 32))
    assert found.largest is not None
    assert (found.largest.micro_batch, found.largest.too_large) == (32, 64)
    assert found.plan.micro_batch == 8, "nothing is faster, so nothing is changed"
    assert found.measured is None
    assert not found.changes


def test_where_memory_binds_recomputing_is_tried_with_what_it_makes_room_for() -> None:
    def fits(plan: Plan) -> bool:
        return plan.micro_batch <= (16 if plan.recompute == "none" else 64)

    found = tuned(PretendedGpu(lambda plan: 100.0 + plan.micro_batch, fits))
    assert found.plan.micro_batch == 32
    assert found.plan.recompute == "selective"
    assert found.plan.micro_batch * found.plan.accumulate == 64


def test_a_knob_whose_other_values_are_all_refused_says_what_refuses_them() -> None:
    document = {
        "name": "cnn",
        "model": {"use": "simple-cnn"},
        "data": {"use": "synthetic-images", "size": 32, "samples": 512},
        "batch": 64,
        "steps": 10,
        "optimizer": {"use": "sgd", "lr": 0.1},
    }
    recipe = resolved(Recipe.from_document(document))
    found = tuned(PretendedGpu(lambda plan: 100.0), start(micro_batch=64, accumulate=1), recipe, knobs=["micro_batch"])
    (step,) = found.steps
    assert step.why.startswith("nothing else can be: ")
    assert "batch normalisation" in step.why


def test_narrow_weights_are_kept_if_they_are_faster_and_the_loss_stays() -> None:
    def rate(plan: Plan) -> float:
        return 104.0 if plan.narrow_weights else 100.0

    ranks = PretendedGpu(rate)
    assert tuned(ranks, knobs=["narrow_weights"]).changes == {"narrow_weights": True}
    ranks.loss = lambda plan: 2.1 if plan.narrow_weights else 2.0
    (step,) = tuned(ranks, knobs=["narrow_weights"]).steps
    assert (step.kept, step.loss_gap) == (False, pytest.approx(0.05))


def test_graphs_and_a_loss_in_parts_are_kept_if_they_are_faster() -> None:
    def rate(plan: Plan) -> float:
        return 100.0 * (2.0 if plan.cuda_graph else 1.0) * {1: 1.0, 4: 1.1}.get(plan.loss_chunks, 1.05)

    found = tuned(PretendedGpu(rate), start(micro_batch=64, accumulate=1), knobs=["cuda_graph", "loss_chunks"])
    assert found.changes == {"cuda_graph": True, "loss_chunks": 4}


def test_what_the_recipe_fixes_stays_and_is_not_even_tried() -> None:
    ranks = PretendedGpu(lambda plan: 100.0 * (1 + int(plan.workers)))
    found = tuned(ranks, recipe=gpt("plan.workers=2", "plan.micro_batch=8"))
    assert {plan.workers for plan in ranks.tried} == {2}
    assert {plan.micro_batch for plan in ranks.tried} == {8}
    assert {step.knob: step.why for step in found.steps}["workers"] == "fixed by the recipe"


def test_bf16_is_kept_only_if_the_loss_stays() -> None:
    ranks = PretendedGpu(lambda plan: 200.0 if plan.precision == "bf16" else 100.0)
    assert tuned(ranks, start(precision="fp32")).plan.precision == "bf16"
    ranks.loss = lambda plan: 2.1 if plan.precision == "bf16" else 2.0
    found = tuned(ranks, start(precision="fp32"))
    assert found.plan.precision == "fp32"
    (step,) = (step for step in found.steps if step.knob == "precision")
    assert step.loss_gap == pytest.approx(0.05)
    assert "+5.0%" in step.why


def test_a_plan_that_runs_out_of_memory_is_made_smaller_first() -> None:
    found = tuned(PretendedGpu(lambda plan: 100.0, fits=lambda plan: plan.micro_batch <= 2))
    assert found.plan.micro_batch == 2
    assert found.plan.accumulate == 32
    assert "ran out of memory" in found.steps[0].why
    assert found.changes == {"micro_batch": 2, "accumulate": 32}, "who copies only these must get a plan that fits"


def test_what_made_one_of_several_the_best_does_not_count_for_it() -> None:
    tries: Counter[int] = Counter()

    def lucky_once(plan: Plan) -> float:
        tries[int(plan.workers)] += 1
        return 150.0 if plan.workers == 4 and tries[4] == 1 else 100.0

    found = tuned(PretendedGpu(lucky_once), knobs=["workers"])
    (step,) = found.steps
    assert step.change == "workers 2 → 4"
    assert (step.factor, step.kept) == (1.0, False)


def test_gains_that_are_none_together_are_given_up() -> None:
    said: list[str] = []

    def rate(plan: Plan) -> float:
        """Each knob looks like a gain when its turn comes; at the end, the machine says otherwise."""
        if "the last plan against the first, in turns" in said and plan != start().plan:
            return 90.0
        return 100.0 + 10 * (plan.workers == 4) + 10 * (plan.micro_batch == 16)

    tuner = Tuner(gpt(), start(), cluster(), PretendedGpu(rate), say=said.append, minutes=60)
    found = tuner.tuned(["workers", "micro_batch"], look=False)
    assert [step.kept for step in found.steps] == [True, True]
    assert found.measured is not None
    assert found.measured < 1
    assert not found.changes
    assert any("the first plan stays" in note for note in found.notes)
    assert "together" in found.reasons["workers"]


def test_nothing_that_fits_is_an_error_that_says_so() -> None:
    with pytest.raises(GradusError, match="out-of-memory"):
        tuned(PretendedGpu(lambda plan: 100.0, fits=lambda plan: False))


def test_an_interrupt_keeps_the_best_so_far() -> None:
    ranks = PretendedGpu(lambda plan: 100.0 * (1 + int(plan.workers)))
    whole = tuned(ranks)
    until = next(number for number, plan in enumerate(ranks.tried) if plan.micro_batch != 8)
    again = PretendedGpu(ranks.rate)
    again.interrupt_at = until
    found = tuned(again)
    assert found.interrupted
    assert found.plan.workers == whole.plan.workers != 2
    assert found.plan.micro_batch == 8
    assert found.measured is None
    assert any("interrupted" in note for note in found.notes)


def test_when_the_time_is_over_the_rest_is_named_and_not_tried() -> None:
    ranks = PretendedGpu(lambda plan: 100.0)
    found = tuned(ranks, minutes=0)
    assert len(ranks.tried) == 1
    assert {step.why for step in found.steps} == {"not tried: the time was over"}


def test_little_time_is_shared_between_the_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = SlowTrials(lambda plan: 100.0)
    monkeypatch.setattr("gradus.bench.tune.time", SimpleNamespace(monotonic=lambda: ranks.clock))
    found = tuned(ranks, minutes=1, knobs=["workers", "micro_batch"])
    workers, micro_batch = found.steps
    assert any("left out, for other knobs" in text for text in workers.tried)
    assert micro_batch.tried, micro_batch.why


def test_what_findings_point_at_is_tried_first() -> None:
    assert ordered([]) == list(KNOBS)
    assert ordered(["exposed-communication", "straggler", "data-bound"])[:2] == ["bucket", "workers"]
    assert ordered(["small-kernels"], ["workers", "compile"]) == ["compile", "workers"]


@pytest.mark.parametrize(
    ("knob", "changes", "why"),
    [
        ("bucket", {}, "several replicas"),
        ("precision", {}, "bf16 already"),
        ("recompute", {}, "memory does not bind"),
        ("channels_last", {}, "no images"),
        ("narrow_weights", {"precision": "fp32"}, "in fp32"),
        ("narrow_weights", {"mesh": Mesh(replicate=2)}, "for one rank"),
        ("loss_chunks", {"mesh": Mesh(tensor=2)}, "a part of the vocabulary"),
        ("cuda_graph", {}, "accumulate is 8"),
        ("cuda_graph", {"mesh": Mesh(replicate=2)}, "the mesh has 2 ranks"),
    ],
)
def test_a_knob_that_cannot_help_says_why(knob: str, changes: dict[str, Any], why: str) -> None:
    plan = start(**changes).plan
    last = Tried("measured", batch=64, step_seconds=(1.0,), data_seconds=0.5)
    assert why in candidates(knob, Standing(gpt(), cluster(), plan, last)).why_none


@pytest.mark.parametrize("said", ["recompute=selective", "recompute_blocks=1"])
def test_what_the_recipe_says_of_recomputing_stays(said: str) -> None:
    last = Tried("measured", batch=64, step_seconds=(1.0,), data_seconds=0.5)
    plan = start(recompute="selective", recompute_blocks=1).plan
    assert candidates("recompute", Standing(gpt(), cluster(), plan, last)).changes == (
        {"recompute": "none", "recompute_blocks": None},
    )
    found = candidates("recompute", Standing(gpt(f"plan.{said}"), cluster(), plan, last))
    assert (found.changes, found.why_none) == ((), "fixed by the recipe")


def test_workers_are_left_alone_where_nothing_waits_for_samples() -> None:
    last = Tried("measured", batch=64, step_seconds=(1.0,), data_seconds=0.001)
    assert "little to gain" in candidates("workers", Standing(gpt(), cluster(), start().plan, last)).why_none


def test_buckets_are_tried_between_replicas() -> None:
    last = Tried("measured", batch=64, step_seconds=(1.0,), data_seconds=0.5)
    plan = start(mesh=Mesh(replicate=2), micro_batch=4).plan
    found = candidates("bucket", Standing(gpt(), cluster(2), plan, last))
    assert {"bucket_mib": 100} in found.changes
    assert {"bucket_mib": 25} not in found.changes


@pytest.fixture
def slow_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each row takes 10 ms to come."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe_document(8, data={"seconds": 0.01})))
    return file


@pytest.mark.slow
@pytest.mark.long
def test_a_slow_dataset_gets_workers_and_the_recipe_stays_as_it_is(slow_recipe: Path, tmp_path: Path) -> None:
    before = slow_recipe.read_bytes()
    arguments = ["--seconds", "0.5", "--out", "plan.yaml", "--html", "page.html", "--knobs", "workers", "--json"]
    found = Gradus(tmp_path)("tune", "recipe.yaml", *arguments, timeout=900)
    assert found.code == 0, found.err
    document = found.json
    assert document["plan"]["workers"] >= 2
    assert document["measured"] > 1.3
    assert {"data-bound", "too-few-workers"} & set(document["findings"])
    assert Plan.load(tmp_path / "plan.yaml").workers == document["plan"]["workers"]
    assert "measured: " in (tmp_path / "plan.yaml").read_text()
    assert "Tuning of tried" in (tmp_path / "page.html").read_text()
    assert slow_recipe.read_bytes() == before
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["own.py", "page.html", "plan.yaml", "recipe.yaml"]


@pytest.mark.slow
@pytest.mark.long
def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(slow_recipe: Path, tmp_path: Path) -> None:
    command = Gradus(tmp_path)
    process = command.start("tune", "recipe.yaml", "--no-findings", "--seconds", "0.5", "--knobs", "workers")
    assert process.stderr is not None
    for line in process.stderr:
        if "workers" in line and "→" in line:  # a first trial of another value is done
            break
    process.send_signal(signal.SIGINT)
    found = command.end(process)
    assert found.code == 0, found.err
    assert "interrupted: this is the best so far" in found.out
    assert slow_recipe.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "recipe.yaml"], "which is the recipe"),
        (["--out", "nowhere/plan.yaml"], "whose folder is not there"),
        (["--knobs", "worker"], "did you mean 'workers'"),
        (["--html", "."], "which is a folder"),
    ],
)
def test_bad_input_is_told_before_anything_is_measured(
    slow_recipe: Path, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = slow_recipe.read_bytes()
    monkeypatch.chdir(slow_recipe.parent)
    found = CliRunner().invoke(app, ["tune", "recipe.yaml", *arguments, "--json"])
    assert found.exit_code == 2
    assert words in json.loads(found.stdout)["error"]["message"]
    assert slow_recipe.read_bytes() == before
