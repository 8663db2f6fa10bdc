"""A norm that widens what it reads keeps the narrow numbers."""

from __future__ import annotations

from dataclasses import replace

from part_cases import KIB, operator, part, storage

from gradus.planner.memory.timeline import Division, part_memory
from gradus.planner.rewritten.fused_norms import with_fused_norms


def test_what_is_kept_is_as_narrow_as_what_was_read() -> None:
    cast = replace(operator(reads=(0,), writes=(1,)), name="_to_copy")
    eager = replace(
        part("p", storage(2, 0, 1), storage(4, 0, 3)),
        forward=(cast, operator(reads=(1,))),
        backward=(operator(), operator(reads=(1,))),
    )
    assert part_memory(eager, Division(1)).kept.activations == 4 * KIB
    assert part_memory(with_fused_norms(eager), Division(1)).kept.activations == 2 * KIB


def test_a_copy_that_is_narrower_is_left_alone() -> None:
    cast = replace(operator(reads=(0,), writes=(1,)), name="_to_copy")
    eager = replace(part("p", storage(4, 0, 1), storage(2, 0, 3)), forward=(cast, operator(reads=(1,))))
    assert with_fused_norms(eager) == eager
