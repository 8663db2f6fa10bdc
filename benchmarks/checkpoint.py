"""What a checkpoint costs: how long training stands still, how long until it is safe, and how long loading takes.

Side by side in one run, in turns: gradus, plain `torch.distributed.checkpoint` (its `save`, `async_save`, `load`), and
one plain copy of the same bytes, which is the least that training can stand still for.

    python benchmarks/checkpoint.py --gigabytes 2 --folder FOLDER              on the CPU
    python benchmarks/checkpoint.py --gigabytes 15.8 --device cuda --folder F  the full state of a 1.3B model on a GPU
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from gradus.checkpoint.owners import owned
from gradus.checkpoint.reading import read_rows
from gradus.checkpoint.retention import Retention
from gradus.checkpoint.store import CheckpointStore
from gradus.checkpoint.writer import Writer
from gradus.parallel.world import alone

WIDTH, KINDS = 2048, ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")


def state_of(gigabytes: float, device: torch.device) -> dict[str, Tensor]:
    """Weights and Adam's state of a transformer, as many blocks as it takes, with its many small tensors."""
    shapes = {
        "attention.qkv.weight": (3 * WIDTH, WIDTH),
        "attention.out.weight": (WIDTH, WIDTH),
        "mlp.up.weight": (4 * WIDTH, WIDTH),
        "mlp.down.weight": (WIDTH, 4 * WIDTH),
        **{f"{name}.{kind}": (WIDTH,) for name in ("attention_norm", "mlp_norm") for kind in ("weight", "bias")},
    }
    block_bytes = sum(torch.Size(shape).numel() for shape in shapes.values()) * 4 * len(KINDS)
    state: dict[str, Tensor] = {}
    for block in range(max(1, round(gigabytes * 1e9 / block_bytes))):
        for name, shape in shapes.items():
            for kind in KINDS:
                state[f"{kind}.blocks.{block}.{name}"] = torch.randn(shape, device=device)
    return state


def synchronised(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], Any], device: torch.device) -> float:
    synchronised(device)
    began = time.perf_counter()
    work()
    synchronised(device)
    return time.perf_counter() - began


class Measurement:
    def __init__(self, gigabytes: float, device: torch.device, folder: Path, load: bool) -> None:
        self.device, self.folder, self.load = device, folder, load
        self.state = state_of(gigabytes, device)
        self.bytes = sum(tensor.nbytes for tensor in self.state.values())
        pinned = device.type == "cuda"
        self.room = {n: torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned) for n, t in self.state.items()}
        for tensor in self.room.values():
            tensor.zero_()  # so that its pages are there
        self.writer = Writer(folder / "gradus", 0, 1, device)
        self.writer.prepare(self.bytes)
        self.step = 0

    def one_copy(self) -> dict[str, float]:
        def copy() -> None:
            for name, tensor in self.state.items():
                self.room[name].copy_(tensor, non_blocking=True)

        return {"copy": timed(copy, self.device)}

    def gradus(self) -> dict[str, float]:
        self.step += 1
        began = time.perf_counter()
        mine = owned(self.state, alone(self.device), alone=frozenset())
        stall = timed(lambda: self.writer.save(self.step, mine, {"state": {}}, Retention(1)), self.device)
        self.writer.wait("committed")
        safe = time.perf_counter() - began
        found = {"gradus stall": stall, "gradus safe": safe}
        if self.load:
            store = CheckpointStore(self.folder / "gradus")
            stored = dict(store.open(self.step, every_byte=False).stored())
            bare = {name: _unverified(tensor) for name, tensor in stored.items()}
            target = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
            for tensor in target.values():
                tensor.zero_()
            for name, pieces in (("gradus load, unverified", bare), ("gradus load", stored)) * 2:
                found[name] = timed(lambda: [read_rows(pieces[n], t) for n, t in target.items()], self.device)  # noqa: B023
            assert all(torch.equal(target[name], tensor) for name, tensor in self.state.items())
        return found

    def torch_sync(self) -> dict[str, float]:
        path = self.folder / "dcp"
        shutil.rmtree(path, ignore_errors=True)
        seconds = timed(lambda: dcp.save(self.state, checkpoint_id=path, no_dist=True), self.device)
        found = {"torch save": seconds}
        if self.load:
            target = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
            for tensor in target.values():
                tensor.zero_()
            found["torch load"] = timed(lambda: dcp.load(target, checkpoint_id=path, no_dist=True), self.device)
        shutil.rmtree(path)
        return found

    def torch_async(self) -> dict[str, float]:
        path = self.folder / "dcp_async"
        shutil.rmtree(path, ignore_errors=True)
        began = time.perf_counter()
        future: Any = None

        def save() -> None:
            nonlocal future
            future = dcp.async_save(self.state, checkpoint_id=path, no_dist=True)

        stall = timed(save, self.device)
        (future.upload_completion if hasattr(future, "upload_completion") else future).result()
        safe = time.perf_counter() - began
        shutil.rmtree(path)
        return {"torch async stall": stall, "torch async safe": safe}


def _unverified(stored: Any) -> Any:
    pieces = tuple(dataclasses.replace(piece, digests=None) for piece in stored.pieces)
    return dataclasses.replace(stored, pieces=pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, required=True, help="a folder on the disk that is to be measured")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-load", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    given = parser.parse_args()
    device = torch.device(given.device)
    given.folder.mkdir(parents=True, exist_ok=True)
    measurement = Measurement(given.gigabytes, device, given.folder, not given.no_load)
    turns = [measurement.one_copy, measurement.gradus, measurement.torch_sync, measurement.torch_async]
    found: dict[str, list[float]] = {}
    for turn in range(given.repeat + 1):
        for measure in turns:
            for name, seconds in measure().items():
                if turn:  # the first one warms up
                    found.setdefault(name, []).append(seconds)
    measurement.writer.close()
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    print(
        f"{measurement.bytes / 1e9:.2f} GB in {len(measurement.state)} tensors on {device}, torch {torch.__version__}"
    )
    for name, seconds in found.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        rate = measurement.bytes / medians[name] / 1e9
        print(f"{name:<26} {medians[name]:8.3f} s   ({spread})   {rate:6.2f} GB/s")
    ratios = {"stall over one copy": medians["gradus stall"] / medians["copy"]}
    ratios["stall over torch's async stall"] = medians["gradus stall"] / medians["torch async stall"]
    ratios["safe over torch's save"] = medians["gradus safe"] / medians["torch save"]
    if "gradus load" in medians:
        ratios["load over unverified load"] = medians["gradus load"] / medians["gradus load, unverified"]
        ratios["load over torch's load"] = medians["gradus load"] / medians["torch load"]
    for name, ratio in ratios.items():
        print(f"{name:<32} {ratio:.2f}")
    if given.json:
        given.json.write_text(json.dumps({"bytes": measurement.bytes, "seconds": found, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
