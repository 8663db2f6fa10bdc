"""Parts of models made by hand, whose bytes can be counted on paper."""

from __future__ import annotations

from gradus.planner.profile.program import Amount, Divides, ModelProfile, Operator, Part, Role, Storage, Weights

KIB = 1024


def operator(*, reads: tuple[int, ...] = (), writes: tuple[int, ...] = (), flops: float = 1.0) -> Operator:
    nothing = Amount()
    return Operator("mm", "matmul", Amount(0, flops), nothing, nothing, "bfloat16", reads=reads, writes=writes)


def storage(
    kib: float,
    made: int,
    last: int,
    role: Role = "activation",
    *,
    divides: Divides = "sequence",
    fixed: bool = False,
    expert: bool = False,
) -> Storage:
    """So many KiB for each sample; for any number of them, if `fixed`."""
    size = Amount(kib * KIB, 0) if fixed else Amount(0, kib * KIB)
    return Storage(size, made, last, role, divides, expert)


def part(
    name: str, *storages: Storage, block: bool = True, elements: int = 0, trained: bool = True, operators: int = 2
) -> Part:
    """As many operators in forward as in backward; the output is of 1 KiB for each sample."""
    each = tuple(operator() for _ in range(operators))
    weights = (Weights(elements, trained=trained),) if elements else ()
    return Part(name, block, each, each, storages, weights, output=Amount(0, KIB))


def profile(*called: tuple[Part, int], narrow: bool = False, precision: str = "fp32", tied: int = 0) -> ModelProfile:
    """The parts in the order of forward, each so many times in a row."""
    calls = tuple(number for number, (_, times) in enumerate(called) for _ in range(times))
    parts = tuple(one for one, _ in called)
    return ModelProfile("handmade", parts, calls, precision, narrow, (1, 2), tied_elements=tied, tied_trained=tied)
