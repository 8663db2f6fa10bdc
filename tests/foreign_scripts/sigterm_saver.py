#!/usr/bin/env python
"""Argparse, and a signal handler that saves when the scheduler takes the node away."""

import argparse
import logging
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn

logger = logging.getLogger(__name__)
stop_requested = False


def request_stop(signum, frame):
    global stop_requested
    stop_requested = True


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-time", type=float, default=0.0, help="seconds to sleep in each step")
    parser.add_argument("--output-dir", required=True)
    return parser.parse_args()


def main():
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    signal.signal(signal.SIGTERM, request_stop)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(1234)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    os.makedirs(args.output_dir, exist_ok=True)
    path = os.path.join(args.output_dir, "last.pt")
    start = 0
    if os.path.exists(path):
        saved = torch.load(path, map_location=device)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
        logger.info("resumed at step %d", start)

    generator = torch.Generator().manual_seed(rank)
    step = start
    while step < args.steps:
        x = torch.randn(32, 8, generator=generator).to(device)
        loss = ((model(x) - x[:, :1].sin()) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.step_time)
        step += 1
        if step % 10 == 0 and rank == 0:
            logger.info("step %d/%d loss %.4f", step, args.steps, loss.item())
        # all ranks must leave at the same step
        flag = torch.tensor([1.0 if stop_requested else 0.0], device=device)
        dist.all_reduce(flag)
        if flag.item() > 0:
            break

    seen = torch.tensor([float(rank)], device=device)
    dist.all_reduce(seen)
    if rank == 0:
        tmp = path + ".tmp"
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "loss": loss.item()}
        torch.save({**state, "world": world, "rank_sum": seen.item()}, tmp)
        os.replace(tmp, path)
        logger.info("saved %s at step %d", path, step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
