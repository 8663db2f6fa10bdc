"""What a part needs depends on what becomes of its results, and on what runs around the modules that are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradus.planner.profile.assembly import Facts, assembled, with_eager_operators
from gradus.planner.profile.program import Part
from gradus.planner.profile.tracing import FakeModel, Numbers
from gradus.training.compilation import names_of_compiled

WIDTH, SAMPLES = 64, (2, 4)
MIB = 2**20


class Block(nn.Module):
    """Keeps a narrow copy of its input, and not its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Model(nn.Module):
    def __init__(self, last: nn.Module, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).float()
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


def traced(
    model: nn.Module, of: Callable[[int], Tensor], loss: Callable[[Tensor], Tensor] = Tensor.sum, **numbers: Any
) -> tuple[list[Part], list[int]]:
    fake = FakeModel(
        model, Numbers(**{"autocast": torch.bfloat16, "narrow_parameters": False, **numbers}), {}, frozenset()
    )
    few, more = (fake.trace(of(n), n, lambda m, batch, _: loss(m(batch).float())) for n in SAMPLES)
    parts, calls, _ = assembled(few, more, SAMPLES, Facts({}, frozenset()))
    return parts, calls


def rows(samples: int) -> Tensor:
    return torch.zeros(samples, 16, WIDTH)


def kept(part: Part) -> float:
    return sum(storage.bytes.per_sample for storage in part.kept() if storage.role == "activation")


def test_the_last_of_many_blocks_keeps_its_result_if_what_follows_needs_it() -> None:
    parts, calls = traced(Model(nn.LayerNorm(WIDTH)), rows)
    blocks = [number for number in calls if parts[number].block]
    assert len(blocks) == 4
    assert len(set(blocks[:3])) == 1
    # A layer norm keeps what it is given, in float32.
    assert kept(parts[blocks[3]]) - kept(parts[blocks[0]]) == 16 * WIDTH * 4


def test_blocks_that_all_hand_on_what_the_next_one_keeps_are_one_part() -> None:
    parts, calls = traced(Model(Block()), rows)
    assert len({number for number in calls if parts[number].block}) == 1


def test_what_runs_outside_the_compiled_modules_is_known() -> None:
    model = Model(nn.Linear(WIDTH, 4))
    names = names_of_compiled(model)
    assert names == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "first", "last"]
    parts, _ = traced(model, rows)
    *_, last = (with_eager_operators(part, names) for part in parts)
    assert [op.name for op in last.forward if op.eager] == ["_to_copy", "sum"]
    assert [op.name for op in last.forward if op.kind == "matmul" and not op.eager]
    assert not any(op.eager for part in parts if part.block for op in with_eager_operators(part, names).operators)
    assert not any(op.eager for op in with_eager_operators(parts[-1], [""]).operators), "all of it is compiled"


def test_a_layer_norm_copies_what_does_not_lie_in_order() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.transpose(1, 2))  # type: ignore[no-any-return]

    parts, _ = traced(Turned(), lambda n: torch.zeros(n, WIDTH, 16), autocast=None)
    (part,) = parts
    copied = next(s for s in part.storages if s.role == "workspace")
    assert copied.bytes.per_sample == 16 * WIDTH * 4


def test_the_gradient_of_a_bias_needs_a_buffer_once_there_are_many_rows() -> None:
    parts, _ = traced(nn.Linear(WIDTH, 4096), rows)
    (needed,) = [s for part in parts for s in part.storages if s.role == "workspace"]
    assert needed.bytes == (132 * MIB, 0.0)
    assert needed.divides == "whole"
    assert 1024 <= 16 * needed.from_samples <= 16_384
