"""Which calls a pipeline stage makes, and cuts that are as good as the best."""

from __future__ import annotations

import pytest

from gradus.parallel.stages import balanced
from gradus.planner.profile.program import Amount, ModelProfile, Operator, Part
from gradus.planner.staging import stage_counts, staged_calls
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan


def part(name: str, flops: float, block: bool) -> Part:
    operator = Operator("mm", "matmul", Amount(0, flops), Amount(), Amount(), "bfloat16")
    return Part(name, block, (operator,), (operator,))


PARTS = (
    part("embedding", 1.0, False),
    part("block", 10.0, True),
    part("between", 0.0, False),
    part("head", 20.0, False),
)
PROFILE = ModelProfile("m", PARTS, (0, 1, 1, 2, 1, 1, 1, 1, 3), "bf16", False, (1, 2))


def test_one_stage_makes_all_calls():
    assert staged_calls(PROFILE, Plan()) == [list(PROFILE.calls)]


def test_head_and_tail_go_with_the_first_and_the_last_block():
    stages = staged_calls(PROFILE, Plan(mesh=Mesh(pipeline=2)))
    assert [number for stage in stages for number in stage] == list(PROFILE.calls)
    assert stages[0][0] == 0
    assert stages[-1][-1] == 3
    # The head costs as much as two blocks: the last stage has two fewer.
    assert [stage.count(1) for stage in stages] == [4, 2]


def test_the_plan_may_say_how_many_blocks_a_stage_has():
    stages = staged_calls(PROFILE, Plan(mesh=Mesh(pipeline=2), stage_blocks=[1, 5]))
    assert [stage.count(1) for stage in stages] == [1, 5]


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(InputError, match="each stage needs one"):
        staged_calls(PROFILE, Plan(mesh=Mesh(pipeline=8)))


@pytest.mark.parametrize(("blocks", "stages"), [(96, 8), (105, 35), (126, 14)])
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (0.1, 2.3), (0.0, 7.9)])
def test_blocks_that_are_alike_are_dealt_out_as_well_as_can_be(blocks, stages, before, after):
    def worst(counts):
        extras = [before] + [0.0] * (stages - 2) + [after]
        return max(count + extra for count, extra in zip(counts, extras, strict=True))

    costs = (1.0,) * blocks
    found = stage_counts(costs, stages, before, after)
    assert sum(found) == blocks
    assert min(found) >= 1
    assert worst(found) == pytest.approx(worst(balanced(costs, stages, before=before, after=after)))
