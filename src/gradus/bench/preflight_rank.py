"""A rank of a preflight: exchanges data with the other nodes in pairs, then with all, and says how fast and how right.

Started by the preflight's task on each node, once for each GPU. It prints lines of JSON, each as soon as it is known:
a rank that hangs later has said by then what worked.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from gradus.bench.collectives import DTYPES, measured
from gradus.launcher.preflight.pairs import tournament

_MOST_ROUNDS = 31  # all pairs of up to 32 nodes; beyond, everybody meets 31 others
_PAIR_SECONDS = 6.0  # after which a pair counts as dead
_REPEATS = 3  # of each direction of a pair
_ROUNDS_SECONDS = 15.0  # for all pairs; the rest is left out
_ALL_REDUCE_SECONDS = 0.3  # of each size
# Large enough that latency does not matter: 64 MiB takes 1 ms at 64 GB/s. TCP between CPUs is slower and gets less.
_GPU_BYTES, _CPU_BYTES = 64 << 20, 4 << 20
_CHECKED = ((8, "int64"), (4096, "int32"), (1 << 20, "float32"), (1 << 20, "bfloat16"), (3 * 1000 + 7, "float64"))


def say(**known: Any) -> None:
    print(json.dumps(known), flush=True)


def main() -> None:
    given = json.loads(sys.argv[1])
    until = time.monotonic() + given["seconds"]
    node, nodes, here, local_rank = given["node"], given["nodes"], given["ranks_here"], given["local_rank"]
    rank, size = node * here + local_rank, nodes * here
    device = _device(local_rank)
    nccl = device.type == "cuda"
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else None  # type: ignore[no-untyped-call]
    say(rank=rank, device=str(device), backend="nccl" if nccl else "gloo", nccl_version=version)
    if size == 1:
        say(stage="done")
        return
    say(stage="meeting the other ranks")
    patience = timedelta(seconds=max(5.0, min(30.0, given["seconds"] - 5)))
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=rank == 0, timeout=patience
    )
    # Not bound to a device: then NCCL gives each pair a communicator of its own, and one that hangs stops no other.
    dist.init_process_group("nccl" if nccl else "gloo", store=store, rank=rank, world_size=size, timeout=patience)
    if nodes > 1:
        pairs(node, nodes, here, local_rank, device, store)
    if here > 1:
        say(stage="all-reduce inside the node")
        groups = [dist.new_group(list(range(of * here, (of + 1) * here))) for of in range(nodes)]
        row = measured("all-reduce", _bytes(device), torch.float32, device, group=groups[node], seconds=0.3)
        say(rows=[{"where": "node", **row.document()}])
    say(stage="all-reduce over all ranks")
    for count, name in _CHECKED:
        dtype = DTYPES[name]
        row = measured("all-reduce", count * dtype.itemsize, dtype, device, seconds=0.0)
        say(rows=[{"where": "check", **row.document()}])
    row = measured("all-reduce", _bytes(device), torch.float32, device, seconds=_ALL_REDUCE_SECONDS)
    say(rows=[{"where": "world", **row.document()}])
    say(stage="done")
    if time.monotonic() < until:
        dist.barrier()


def pairs(node: int, nodes: int, here: int, local_rank: int, device: torch.device, store: Store) -> None:
    """Everybody with everybody, in rounds without waiting. Each rank talks to its namesake on the other node."""
    data = torch.ones(_bytes(device) // 4, dtype=torch.float32, device=device)
    rounds = tournament(nodes, _MOST_ROUNDS)
    enough_at = time.monotonic() + _ROUNDS_SECONDS
    for number, matches in enumerate(rounds):
        match = next((match for match in matches if node in match), None)
        if match is not None:
            other = match[1] if match[0] == node else match[0]
            say(stage=f"exchanging data with node {other}")
            peer = other * here + local_rank
            say(pairs=[[other, _exchanged(data, peer, first=node < other)]])
        if _round_ends(store, number, nodes * here, time.monotonic() > enough_at):
            break


def _exchanged(data: torch.Tensor, peer: int, first: bool) -> float | None:
    """GB/s in the slower direction; None if nothing came in time. One direction at a time, so both are known."""
    received = torch.empty_like(data)
    try:
        for sends in (first, not first):  # the first time connections are made, and the data is small
            _moved(data[:1024], received[:1024], peer, sends)
        slowest = float("inf")
        for sends in (first, not first):
            # The best of them: a link that is slow is slow each time, and a core that was busy once is no link.
            best = min(_seconds_to_move(data, received, peer, sends) for _ in range(_REPEATS))
            slowest = min(slowest, data.nbytes / best / 1e9)
        return slowest if bool((received == 1).all()) else 0.0
    except (RuntimeError, TimeoutError):
        return None


def _seconds_to_move(data: torch.Tensor, received: torch.Tensor, peer: int, sends: bool) -> float:
    began = time.perf_counter()
    _moved(data, received, peer, sends)
    return time.perf_counter() - began


def _moved(data: torch.Tensor, received: torch.Tensor, peer: int, sends: bool) -> None:
    work = dist.isend(data, peer) if sends else dist.irecv(received, peer)
    assert work is not None
    if data.device.type == "cpu":
        work.wait(timedelta(seconds=_PAIR_SECONDS))
        return
    until = time.monotonic() + _PAIR_SECONDS  # NCCL would wait without a limit
    while not work.is_completed():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(0.0002)


def _round_ends(store: Store, number: int, ranks: int, enough: bool) -> bool:
    """Wait until a round is over, so that nobody measures while a partner is busy; whether somebody has had enough."""
    if enough:
        store.add(f"enough-{number}", 1)
    store.add(f"round-{number}", 1)
    until = time.monotonic() + 2 * _PAIR_SECONDS
    while store.add(f"round-{number}", 0) < ranks and time.monotonic() < until:
        time.sleep(0.002)
    return bool(store.add(f"enough-{number}", 0) > 0)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _bytes(device: torch.device) -> int:
    return _GPU_BYTES if device.type == "cuda" else _CPU_BYTES


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without tearing torch down, whose threads now and then abort
