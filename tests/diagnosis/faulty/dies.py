"""Scripts that die in one way each: the first argument says how. `no` is their clean twin."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

how, rank = sys.argv[1], int(os.environ["RANK"])
group = None
if how != "no-process-group":
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
if how == "hang":
    dist.barrier()  # from here on, nobody needs long
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=4))
if how == "missing-module" and rank == 1:
    import no_such_module_anywhere  # noqa: F401
model = torch.nn.Linear(4, 1)
for step in range(6):
    if how == "hang" and rank == 1 and step == 3:
        print("rank 1 writes its results", flush=True)
        time.sleep(60)
    if how == "host-memory" and step == 3:
        torch.empty(1 << 50)
    if how == "crash" and step == 3 and rank == 1:
        raise ValueError("the cat is on the keyboard")
    model(torch.rand(8, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
if how != "no-process-group":
    dist.destroy_process_group()
