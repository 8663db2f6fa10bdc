"""Where the time of steps goes with several ranks: what one rank waits for another is nobody's work."""

from __future__ import annotations

import pytest
from breakdown_cases import timed
from training_cases import recipe_for
from watch_cases import slow_recipe

from gradus.record.directory import RunDirectory
from gradus.record.timings import by_rank, mean_seconds, read_timings
from gradus.schema.breakdown import KINDS

SECONDS = 0.2


@pytest.mark.parametrize(
    ("where", "kind"),
    [("forward", "forward"), pytest.param("backward", "backward", marks=pytest.mark.slow), ("data", "data")],
)
def test_a_slow_rank_is_charged_for_what_it_does_and_the_other_for_waiting(pool, tmp_path, where, kind):
    recipe = slow_recipe(tmp_path, **{where: SECONDS / 2 if where == "data" else SECONDS})
    run = RunDirectory.create(tmp_path, recipe.name)
    for told in pool.run(2, timed, str(run.path), recipe):
        assert told == {"state": "finished", "lost": []}
    ranks = {rank: mean_seconds(lines[1:]) for rank, lines in by_rank(read_timings(run)).items()}
    assert ranks[1][kind] >= 0.95 * SECONDS
    assert ranks[0]["exposed_communication"] >= 0.8 * SECONDS
    assert ranks[0][kind] < 0.5 * SECONDS


MESHES = {
    "replicas": {"mesh": {"replicate": 2}},
    "accumulating": {"mesh": {"replicate": 2}, "micro_batch": 3, "accumulate": 4},
    "sharded": {"mesh": {"shard": 2}, "zero": 3},
    "tensor": {"mesh": {"tensor": 2}},
    "pipeline": {"mesh": {"pipeline": 2}, "micro_batch": 6, "accumulate": 4},
}

SLOW = ("accumulating", "tensor")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MESHES]
)
def test_in_any_mesh_the_kinds_add_up_and_have_something_in_each(pool, tmp_path, name):
    recipe = recipe_for("gpt", steps=6, log_every=2, evaluate={"batches": 1}, plan={"workers": 0, **MESHES[name]})
    run = RunDirectory.create(tmp_path, recipe.name)
    pool.run(2, timed, str(run.path), recipe)
    ranks = by_rank(read_timings(run))
    assert list(ranks) == [0, 1]
    for lines in ranks.values():
        assert sum(line.steps for line in lines) == lines[-1].step == 6
        for line in lines:
            assert set(line.seconds) == set(KINDS)
            assert sum(line.seconds.values()) == pytest.approx(line.step_seconds)
            for kind in ("data", "forward", "backward", "exposed_communication", "optimizer"):
                assert line.seconds[kind] > 0, kind
        last = lines[-1]
        assert last.seconds["evaluation"] > 0
        assert last.seconds["checkpoint"] > 0
