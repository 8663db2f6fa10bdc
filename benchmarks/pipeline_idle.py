"""How long ranks wait in each pipeline schedule: measured on stages that sleep, beside what the formula says.

Sleeping needs no cores, so that four ranks can be timed on fewer. Other work on the machine only adds to it: the least
of some steps counts.

python benchmarks/pipeline_idle.py
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pipeline_cases import Sample, scheduled_chain
from pool import Pool

from gradus.parallel.pipeline import run_schedule
from gradus.parallel.stages import bubble
from gradus.parallel.world import World

RANKS, BLOCKS, MICRO_BATCHES = 4, 8, 8
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]

slept: list[float] = []  # how long each sleep really took: a busy machine wakes late


def sleep(seconds: float) -> None:
    began = time.monotonic()
    time.sleep(seconds)
    slept.append(time.monotonic() - began)


class _Sleep(torch.autograd.Function):
    """Forward and backward take a known time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        ctx.seconds = seconds
        if not x.is_meta:
            sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        sleep(ctx.seconds)
        return gradient, None


class Sleeping(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x * self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return y


def idle_share(world: World, schedule: str, per_rank: int, seconds: float, steps: int) -> float:
    """Idle time of this rank in units of its working time, the best of some steps."""
    run = scheduled_chain(world, [Sleeping(seconds) for _ in range(BLOCKS)], schedule, per_rank, MICRO_BATCHES)
    shares = []
    for _ in range(1 + steps):  # the first one also makes connections
        world.barrier()
        slept.clear()
        began = time.monotonic()
        run_schedule(run, [Sample() for _ in range(MICRO_BATCHES)])
        world.barrier()
        assert len(slept) == 2 * MICRO_BATCHES * BLOCKS / world.size
        shares.append((time.monotonic() - began) / sum(slept) - 1)
    return min(shares[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.02, help="for the forward of one block, and its backward")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    print(f"{RANKS} ranks, {MICRO_BATCHES} micro-batches: idle time over working time, mean of the ranks\n")
    print("| schedule | stages per rank | measured | formula |\n|---|---|---|---|")
    with Pool() as pool:
        for schedule, per_rank in SCHEDULES:
            shares = pool.run(RANKS, idle_share, schedule, per_rank, options.seconds, options.steps)
            expected = bubble(schedule, RANKS, MICRO_BATCHES, per_rank)
            print(f"| {schedule} | {per_rank} | {sum(shares) / RANKS:.3f} | {expected:.3f} |", flush=True)


if __name__ == "__main__":
    main()
