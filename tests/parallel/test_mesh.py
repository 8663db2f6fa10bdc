"""What cannot be split yet is refused before any process starts."""

from __future__ import annotations

from typing import Any

import pytest

from gradus.parallel.mesh import check_supported
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        ({"mesh": Mesh(tensor=2)}, "plan.mesh.tensor"),
        ({"mesh": Mesh(pipeline=2)}, "plan.mesh.pipeline"),
        ({"mesh": Mesh(shard=2), "zero": 3}, "plan.mesh.shard"),
        ({"mesh": Mesh(context=2)}, "plan.mesh.context"),
        ({"recompute": "full"}, "plan.recompute"),
        ({"offload": "cpu"}, "plan.offload"),
        ({"precision": "fp8"}, "plan.precision"),
    ],
)
def test_a_plan_that_asks_for_more_is_refused_with_the_field_and_what_is_allowed(
    plan: dict[str, Any], field: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_supported(Plan(**plan))
    assert caught.value.details["field"] == field
    assert "allowed" in caught.value.details
    assert caught.value.hint


def test_replicas_are_fine() -> None:
    check_supported(Plan(mesh=Mesh(replicate=8), precision="bf16"))
