"""Attention over split sequences on a GPU, against one process: two ranks that share the GPU and talk through gloo.

    python benchmarks/gpu_parallel_context.py [--device cpu] [--ranks 2]

Errors are relative to the largest number of what is compared, which is computed in fp32 from the same bf16 inputs by
one process; beside them is the error that one process makes when it computes in bf16 as well. Both ways may be off by a
few times as much. Seconds say little here: ranks that share a GPU wait for each other, and gloo goes through the host.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gradus.models.gpt import GPT
from gradus.models.settings import GPTSettings
from gradus.parallel.context import apply_context, attend_gathered, attend_in_ring, part_of, split_sequence
from gradus.parallel.world import World, connected
from gradus.schema.plan import Mesh, Plan

TIMES_ONE_PROCESS = 4.0  # how much larger an error may be than that of one process in bf16
HEADS, WIDTH = 8, 64


def check_ring(device: str = "cuda", ranks: int = 2) -> None:
    """Prints a table; fails where ring or gather are further from one process than bf16 explains."""
    for check in (attention_is_exact, memory_grows_with_length, model_is_exact):
        if device == "cpu" and check is memory_grows_with_length:  # it asks CUDA how much was used
            continue
        with tempfile.TemporaryDirectory() as folder:
            arguments = (ranks, str(Path(folder) / "store"), device, check)
            torch.multiprocessing.spawn(_rank, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]


def _rank(rank: int, ranks: int, store: str, device_type: str, check: Callable[[World], None]) -> None:
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
    with connected(rank, rank, ranks, device, dist.FileStore(store, ranks), shares_gpu=True) as world:
        check(world.arranged(Mesh(context=ranks)))
        world.barrier()


def say(world: World, line: str) -> None:
    if world.leads:
        print(line, flush=True)


def attend(way: str, world: World, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    mesh = world.submesh("context")
    if way == "ring":
        return attend_in_ring(q, k, v, causal=causal, dropout=0.0, mesh=mesh, otherwise_gather=False)
    return attend_gathered(q, k, v, causal=causal, dropout=0.0, mesh=mesh)


def with_gradients(attention: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    mixed = attention(*leaves)
    mixed.backward(grad.to(mixed.dtype))
    return [mixed.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def attention_is_exact(world: World) -> None:
    names = ("output", "dq", "dk", "dv")
    say(
        world,
        f"{'way':8}{'causal':8}{'kv heads':10}{'tokens':8}" + "".join(f"{name + ' (bf16)':>20}" for name in names),
    )
    lengths = (512, 4096) if world.device.type == "cuda" else (128,)
    for length in lengths:
        for causal in (True, False):
            for kv_heads in (HEADS, HEADS // 4):
                for way in ("gather", "ring"):
                    errors, of_one = compared(world, way, causal, kv_heads, length)
                    numbers = "".join(f"{f'{e:.1e} ({o:.1e})':>20}" for e, o in zip(errors, of_one, strict=True))
                    say(world, f"{way:8}{causal!s:8}{kv_heads:<10}{length:<8}{numbers}")
                    assert all(e <= TIMES_ONE_PROCESS * o for e, o in zip(errors, of_one, strict=True)), (
                        errors,
                        of_one,
                    )


def compared(world: World, way: str, causal: bool, kv_heads: int, length: int) -> tuple[list[float], list[float]]:
    """The largest errors over all ranks of output and gradients, and those of one process in bf16."""
    generator = torch.Generator(world.device).manual_seed(1)
    shapes = [(2, heads, length, WIDTH) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    *inputs, grad = (
        torch.randn(shape, generator=generator, device=world.device).to(torch.bfloat16) for shape in shapes
    )

    def one_process(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv_heads != HEADS)

    def part(x: Tensor) -> Tensor:
        return part_of(x, world.place.context, world.mesh.context, dim=2)

    exact = with_gradients(one_process, [x.float() for x in inputs], grad)
    of_one = with_gradients(one_process, inputs, grad)
    found = with_gradients(lambda q, k, v: attend(way, world, q, k, v, causal), [part(x) for x in inputs], part(grad))
    errors = torch.stack([error(x, part(y)) for x, y in zip(found, exact, strict=True)])
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return errors.tolist(), [error(x, y).item() for x, y in zip(of_one, exact, strict=True)]


def error(found: Tensor, exact: Tensor) -> Tensor:
    return (found.float() - exact).abs().max() / exact.abs().max()


def memory_grows_with_length(world: World) -> None:
    """A mask or scores in memory would grow with the square of the length: fourfold from line to line."""
    say(world, f"{'way':8}{'tokens':10}peak above the inputs, MiB for each rank")
    for way in ("gather", "ring"):
        peaks = []
        for length in (16384, 32768, 65536):
            local = length // world.mesh.context
            q, k, v = (torch.randn(1, heads, local, WIDTH, device=world.device) for heads in (HEADS, 2, 2))
            inputs = [x.to(torch.bfloat16).requires_grad_() for x in (q, k, v)]
            del q, k, v
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            attend(way, world, *inputs, causal=True).sum().backward()
            peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
            say(world, f"{way:8}{length:<10}{peaks[-1]:.0f}")
        assert peaks[-1] < 3 * peaks[-2], peaks


def model_is_exact(world: World) -> None:
    """A whole model under autocast, eager and compiled: loss and gradient norm of the split sequences."""
    say(world, f"{'way':8}{'compile':10}{'loss':>12}{'one process':>14}{'gradient norm':>16}{'one process':>14}")
    for way in ("gather", "ring"):
        for compiled in (False, True) if world.device.type == "cuda" else (False,):
            plan = Plan(mesh=world.mesh, context_attention=way, precision="bf16")  # type: ignore[arg-type]
            split, one = model_step(world, plan, compiled), model_step(world, None, compiled)
            numbers = f"{split[0]:12.5f}{one[0]:14.5f}{split[1]:16.5f}{one[1]:14.5f}"
            say(world, f"{way:8}{compiled!s:10}{numbers}")
            assert all(abs(a - b) < 0.02 * b for a, b in zip(split, one, strict=True)), (split, one)


def model_step(world: World, plan: Plan | None, compiled: bool) -> tuple[float, float]:
    torch.compiler.reset()  # else the other length would be compiled as any length
    torch.manual_seed(0)
    settings: dict[str, Any] = {"layers": 2, "width": 256, "heads": 4, "kv_heads": 2, "context": 512, "vocabulary": 512}
    model = GPT(GPTSettings(**settings, positions="rotary")).to(world.device)
    batch: Any = torch.randint(0, 512, (2, 4, 512), device=world.device).unbind()
    if plan is not None:
        apply_context(model, world, plan)
        batch = split_sequence(batch, world)
    if compiled:
        for block in model.blocks:
            block.compile()
    with torch.autocast(world.device.type, torch.bfloat16):
        output = model(*batch)
    output.loss_sum.backward()
    numbers = torch.stack([output.loss_sum.detach(), output.count])
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    if plan is not None:
        dist.all_reduce(numbers)
        dist.all_reduce(gradients)
    return (numbers[0] / numbers[1]).item(), (gradients.norm() / numbers[1]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU; --device cpu runs what a CPU can")
    check_ring(arguments.device, arguments.ranks)
    print("all checks passed")


if __name__ == "__main__":
    main()
