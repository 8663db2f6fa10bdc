"""What the pool's processes do in tests of stop requests and announcements."""

from __future__ import annotations

import random
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gradus.faults.announcements import NOTICE_STEPS, Announcements
from gradus.faults.stop_request import StopRequest
from gradus.parallel.world import World

Acted = list[tuple[str, int]]
PATIENCE = timedelta(seconds=30)  # ranks that disagree would wait for each other


def boundaries(world: World, seed: int, stop_from: int, save_share: float) -> Acted:
    """The skeleton of the loop: steps are collectives in the background, waited for one step late."""
    dawdle, decide = random.Random(seed * 100 + world.rank), random.Random(seed)
    announcements = Announcements(world)
    acted: Acted = []
    late = None
    for step in range(10_000):
        time.sleep(dawdle.choice((0.0, 0.0, 0.001, 0.004)))
        if world.leads and decide.random() < save_share:
            announcements.announce("save", step)
        if world.leads and step >= stop_from:
            announcements.announce("stop", step)
        saves, stops = announcements.due("save", step), announcements.due("stop", step)
        if saves:
            acted.append(("save", step))
        if stops:
            acted.append(("stop", step))
        if (saves or stops) and late is not None:
            late.wait(PATIENCE)
            late = None
        if stops:
            return acted
        launched = dist.all_reduce(torch.ones(1), async_op=True)
        if late is not None:
            late.wait(PATIENCE)
        late = launched
    raise AssertionError("never stopped")


def read_late(world: World) -> list[list[int]]:
    """Rank 1 sleeps through two saves, and reads of both at once."""
    announcements = Announcements(world)
    saves: list[int] = []
    last = 3 * NOTICE_STEPS
    for step in range(last):
        if world.leads and step in (0, NOTICE_STEPS + 1):
            announcements.announce("save", step)
        if not world.leads and step == NOTICE_STEPS - 1:
            dist.barrier()
        if announcements.due("save", step):
            saves.append(step)
        if world.leads and step == NOTICE_STEPS + 1:
            dist.barrier()
    return [saves]


def announced_twice(world: World) -> list[int]:
    announcements = Announcements(world)
    due = []
    for step in range(20):
        if world.leads and step in (2, 3, 4):
            announcements.announce("save", step)
        dist.barrier()
        if announcements.due("save", step):
            due.append(step)
    return due


def told_by_rank_0(world: World, folder: str) -> tuple[bool, bool, str | None]:
    """Each rank has a folder of its own, so that only rank 0 can find the file."""
    file = Path(folder) / str(world.rank) / "stop"
    file.parent.mkdir()
    stop = StopRequest(file, world)
    before = stop.seen()
    dist.barrier()
    if world.leads:
        file.write_text('{"reason": "deadline"}')
        stop.look_every_seconds = 0
        stop._next_look = 0
        assert stop.seen()
    dist.barrier()
    return before, stop.seen(), stop.reason
