"""The memory of one part, counted on paper. Parts have two operators forward (0, 1) and two backward (2, 3)."""

from __future__ import annotations

from dataclasses import replace

from part_cases import KIB, operator, part, storage

from gradus.planner.memory.timeline import Division, part_memory
from gradus.planner.profile.program import Amount

ONE = Division(1)


def test_the_worst_moment_of_forward_is_the_operator_at_which_most_is_there() -> None:
    found = part_memory(part("p", storage(3, 0, 0), storage(4, 0, 1), storage(1, 1, 1)), ONE)
    assert found.forward.activations == 7 * KIB
    assert found.kept.total == 0


def test_what_backward_needs_is_kept_and_is_there_until_its_last_use() -> None:
    found = part_memory(part("p", storage(4, 0, 2), storage(2, 1, 3), storage(1, 3, 3)), ONE)
    assert found.kept.activations == 6 * KIB
    assert found.backward.activations == 6 * KIB, "at operator 2; at 3 there are 2 + 1"


def test_gradients_pile_up_unless_they_are_added_to_some_that_are_there() -> None:
    gradients = [storage(8, 2, 4, "gradient", fixed=True), storage(2, 3, 4, "gradient", fixed=True)]
    found = part_memory(part("p", *gradients), ONE)
    assert found.gradients == found.backward.gradients == 10 * KIB
    assert found.backward_adding.gradients == 8 * KIB


def test_a_copy_that_backward_does_not_read_is_there_until_forward_of_the_model_ends() -> None:
    copies = part("p", storage(6, 0, 2, "copy", fixed=True))
    found = part_memory(copies, ONE)
    assert (found.cached, found.kept.copies, found.backward.copies) == (6 * KIB, 0, 0)
    assert found.forward.copies == 6 * KIB
    read = replace(copies, backward=(operator(reads=(0,)), operator()))
    assert part_memory(read, ONE).kept.copies == 6 * KIB


def test_what_was_there_before_the_part_counts_where_it_was_made() -> None:
    found = part_memory(part("p", storage(5, -1, 3)), ONE)
    assert found.forward.total == found.kept.total == 0
    assert found.received == 5 * KIB


def test_each_kind_of_storage_shrinks_with_what_divides_it() -> None:
    sizes = [storage(8, 0, 2, divides=divides) for divides in ("tensor", "sequence", "whole")]  # type: ignore[arg-type]
    one = part("p", *sizes)

    def kept(**ways: int | bool) -> float:
        return part_memory(one, Division(4, **ways)).kept.activations / KIB  # type: ignore[arg-type]

    assert kept() == 3 * 32
    assert kept(tensor=4) == 8 + 32 + 32
    assert kept(tensor=4, sequence=True) == 8 + 8 + 32
    assert kept(context=2) == 3 * 16


def test_sizes_that_do_not_grow_with_samples_are_not_divided_by_the_context() -> None:
    found = part_memory(part("p", storage(8, 0, 2, fixed=True)), Division(4, context=2))
    assert found.kept.activations == 8 * KIB


def test_tokens_of_experts_are_as_many_on_every_rank_and_their_weights_are_not() -> None:
    tokens = storage(4, 0, 2, expert=True)
    gradients = storage(8, 2, 4, "gradient", fixed=True, expert=True)
    found = part_memory(part("p", tokens, gradients), Division(1, expert=4))
    assert (found.kept.activations, found.gradients) == (4 * KIB, 2 * KIB)


def test_the_allocator_hands_out_multiples_of_512_bytes() -> None:
    assert Division(1).size(Amount(1, 0)) == 512
    assert Division(3).size(Amount(0, 512)) == 3 * 512


def test_what_waits_on_the_host_is_on_the_device_only_while_it_is_read() -> None:
    kept = part("p", storage(4, 0, 3), storage(2, 0, 3))
    read = replace(
        kept,
        forward=(operator(writes=(0, 1)), operator()),
        backward=(operator(reads=(1,)), operator(reads=(0,))),
    )
    found = part_memory(read, ONE, waiting_on_host=True)
    assert found.forward.activations == 6 * KIB
    assert found.backward.activations == 6 * KIB, "both at operator 3, of which the second came at 2"
    early = replace(read, storages=(storage(4, 0, 3), storage(2, 0, 2)))
    assert part_memory(early, ONE, waiting_on_host=True).backward.activations == 4 * KIB
    assert part_memory(early, ONE).backward.activations == 6 * KIB
