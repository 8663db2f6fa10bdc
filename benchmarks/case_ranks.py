"""Ranks that share the one GPU, for measure_cases.py: each pair is two processes of that script.

Only memory is measured, so all pairs run at the same time.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from case_runs import DEVICE, ON_GPU, live_run
from plan_cases import named, small

from gradus.parallel.world import connected, store_from_environment
from gradus.record.directory import RunDirectory
from gradus.training.memory import memory_of

RANKS = 2
STEPS = 3
MOST_SECONDS = 65.0


def launched(names: list[str], folder: Path, small_ones: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case and what its ranks found."""
    started = []
    for name in names:
        place = RunDirectory.create(folder, name.replace(" ", "-")).path
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(RANKS):
            command = [sys.executable, str(Path(__file__).with_name("measure_cases.py")), "--rank", name, str(place)]
            given = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1"}
            environment = {**os.environ, **{key: str(value) for key, value in given.items()}, "MASTER_PORT": str(port)}
            with (place / f"rank-{rank}.log").open("w") as log:
                process = subprocess.Popen(
                    [*command, *(["--small"] if small_ones else [])], env=environment, stdout=log, stderr=log
                )
            started.append((name, place, rank, process))
    ends_at = time.monotonic() + MOST_SECONDS
    for *_, process in started:
        try:
            process.wait(timeout=max(0.1, ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for name in names:
        here = [(place, rank) for other, place, rank, _ in started if other == name]
        files = [place / f"rank-{rank}.json" for place, rank in here]
        if all(file.exists() for file in files):
            yield name, {"ranks": [json.loads(file.read_text()) for file in files], "held_out": named(name).held_out}
        else:
            logs = " | ".join((place / f"rank-{rank}.log").read_text()[-1500:] for place, rank in here)
            print(logs, flush=True)
            yield name, {"failed": logs[-600:]}


def measure_rank(name: str, place: Path, small_one: bool) -> NoReturn:
    """Be one of the ranks: a few steps, the peak of each, and leave."""
    case = small(named(name)) if small_one else named(name)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with connected(rank, rank, size, DEVICE, store_from_environment(), shares_gpu=True) as world:
        live = live_run(case, RunDirectory(place), world)
        built = torch.cuda.memory_allocated() if ON_GPU else None
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        batches = live.loader.micro_batches(0, live.total_steps)
        peaks: list[int | None] = []
        for step in range(STEPS):
            loss = live.step.run(batches, step, live.schedule(step), measure_norm=False).wait().loss
            peaks.append(torch.cuda.max_memory_allocated() if ON_GPU else None)
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
        found = {
            "rank": rank,
            "built_bytes": built,
            "peaks_bytes": peaks,
            "peak_bytes": max(p for p in peaks if p is not None) if ON_GPU else None,
            "state_bytes": asdict(memory_of(live.step.model, live.optimizer, DEVICE)),
            "reserved_bytes": torch.cuda.max_memory_reserved() if ON_GPU else None,
            "loss": loss,
        }
        world.barrier()
        part = place / f"rank-{rank}.part"
        part.write_text(json.dumps(found))
        part.replace(place / f"rank-{rank}.json")
        sys.stdout.flush()
        os._exit(0)  # closing groups of gloo under a model that uses them may wait for ever
