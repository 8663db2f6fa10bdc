"""What each lever does to a training step of a GPT: one variant after the other, with where the GPU's time went.

    python benchmarks/gpu_levers.py [--work gpt2|gpt-1.3b] [--only WORD ...] [--out FOLDER]
    python benchmarks/gpu_levers.py --small     # a quick check that it runs, on any machine

Every variant has the same weights, samples and optimizer, in a plain loop: what is kept of it goes into the product.
The first variant is measured again at the end, which shows by how much the machine itself has moved meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradus.models import catalogue

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
ROUNDS = 3


@dataclass(frozen=True)
class Work:
    """A model of the catalogue and the samples of one step."""

    settings: dict[str, Any]
    batch: int
    steps: int  # of a round


WORKS = {
    "gpt2": Work({"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50304}, 32, 15),
    "gpt-1.3b": Work({"layers": 24, "width": 2048, "heads": 16, "context": 2048, "vocabulary": 50304}, 8, 5),
    "small": Work({"layers": 2, "width": 64, "heads": 4, "context": 64, "vocabulary": 512}, 4, 2),
}


@dataclass(frozen=True)
class Variant:
    name: str
    attention: SDPBackend | None = None
    compiled: str = "whole"  # or: blocks, nothing
    mode: str | None = None  # of torch.compile
    loss_chunks: int = 0  # 0: all logits at once
    weights: torch.dtype = torch.float32  # bfloat16: cast once a step, not by autocast wherever they are used
    options: dict[str, Any] = field(default_factory=dict)  # of inductor


PLAIN = Variant("as peers do it")
VARIANTS = (
    PLAIN,
    Variant("cuDNN attention", attention=SDPBackend.CUDNN_ATTENTION),
    Variant("compiled by block", compiled="blocks"),
    Variant("loss in 4 chunks", loss_chunks=4),
    Variant("loss in 16 chunks", loss_chunks=16),
    Variant("bf16 weights", weights=torch.bfloat16),
    Variant("max-autotune", mode="max-autotune-no-cudagraphs"),
    Variant(
        "cuDNN attention, loss in 8 chunks, bf16 weights",
        attention=SDPBackend.CUDNN_ATTENTION,
        loss_chunks=8,
        weights=torch.bfloat16,
    ),
)


@dataclass(frozen=True)
class Measured:
    name: str
    seconds: float  # of a step
    spread: float
    tokens_per_second: float
    peak_gib: float
    first_step_seconds: float
    first_loss: float
    last_loss: float
    kernel_seconds: dict[str, float]  # of a step, by kind


class ChunkedLoss(torch.autograd.Function):
    """Output projection and cross-entropy, so many tokens at a time. Gradients are made on the way: no logits stay."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunks: int) -> Tensor:
        rows, matrix = x.flatten(0, -2), weight.to(x.dtype)
        of_rows = torch.empty_like(rows)
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        loss = torch.zeros((), device=x.device)
        parts = (rows.chunk(chunks), targets.flatten().chunk(chunks), of_rows.chunk(chunks))
        for part, wanted, of_part in zip(*parts, strict=True):
            part_loss, of_logits = _loss_and_gradient(part, matrix, wanted, len(rows))
            loss += part_loss
            torch.mm(of_logits, matrix, out=of_part)
            of_weight += of_logits.t() @ part
        ctx.save_for_backward(of_rows.view_as(x), of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_rows, of_weight = ctx.saved_tensors
        return of_rows * gradient, of_weight * gradient, None, None


@torch.compile(disable=not CUDA, dynamic=False)
def _loss_and_gradient(rows: Tensor, matrix: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    logits = (rows @ matrix.t()).float()
    normaliser = torch.logsumexp(logits, dim=-1)
    loss = (normaliser - logits.gather(1, targets[:, None]).squeeze(1)).sum() / count
    columns = torch.arange(logits.shape[-1], device=logits.device)
    gradient = torch.exp(logits - normaliser[:, None]) - (columns == targets[:, None]).float()
    return loss, (gradient / count).to(rows.dtype)


class Training:
    """A model with one variant's levers pulled, and a step of it."""

    def __init__(self, work: Work, variant: Variant) -> None:
        torch.manual_seed(0)
        self.work, self.variant = work, variant
        self.model = catalogue.build("gpt", work.settings).to(DEVICE)
        self.masters = list(self.model.parameters())
        if variant.weights != torch.float32:
            self.masters = [p.detach().clone().requires_grad_() for p in self.masters]
            self.model.to(variant.weights)
        self.optimizer = torch.optim.AdamW(self.masters, lr=3e-4, weight_decay=0.1, fused=True)
        generator = torch.Generator().manual_seed(1)
        shape = (8, work.batch, work.settings["context"] + 1)
        self.samples = torch.randint(0, work.settings["vocabulary"], shape, generator=generator).to(DEVICE)
        self.forward = self._compiled()

    def _compiled(self) -> Callable[[Tensor, Tensor], Tensor]:
        how: dict[str, Any] = {"dynamic": False}
        how |= {"mode": self.variant.mode} if self.variant.mode else {}
        how |= {"options": self.variant.options} if self.variant.options else {}
        if not CUDA or self.variant.compiled == "nothing":
            return self._chunked(self._hidden) if self.variant.loss_chunks else self._whole
        if self.variant.compiled == "blocks":
            for block in self.model.blocks:
                block.compile(**how)
            self.model.head.compile(**how)
            return self._chunked(self._hidden) if self.variant.loss_chunks else self._whole
        if self.variant.loss_chunks:
            return self._chunked(torch.compile(self._hidden, **how))
        return torch.compile(self._whole, **how)

    def _whole(self, tokens: Tensor, targets: Tensor) -> Tensor:
        result = self.model(tokens, targets)
        return result.loss_sum / result.count

    def _hidden(self, tokens: Tensor) -> Tensor:
        x = self.model.embedding(tokens)
        for block in self.model.blocks:
            x = block(x)
        return self.model.head.norm(x)

    def _chunked(self, hidden: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        weight, chunks = self.model.head.output.weight, self.variant.loss_chunks

        def forward(tokens: Tensor, targets: Tensor) -> Tensor:
            x = hidden(tokens)
            wide = torch.bfloat16 if CUDA else x.dtype
            return ChunkedLoss.apply(x.to(wide), weight, targets, chunks)  # type: ignore[no-any-return]

        return forward

    def step(self, number: int) -> Tensor:
        tokens = self.samples[number % len(self.samples)]
        attention = sdpa_kernel(self.variant.attention) if self.variant.attention and CUDA else contextlib.nullcontext()
        with attention, torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            loss = self.forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        self._update()
        return loss.detach()

    def _update(self) -> None:
        used = list(self.model.parameters())
        if self.variant.weights != torch.float32:
            for master, parameter in zip(self.masters, used, strict=True):
                master.grad = parameter.grad.float() if parameter.grad is not None else None
                parameter.grad = None
        nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.variant.weights != torch.float32:
            with torch.no_grad():
                torch._foreach_copy_(used, self.masters)


def measured(work: Work, variant: Variant) -> Measured:
    torch._dynamo.reset()
    if CUDA:
        torch.cuda.empty_cache()
    training = Training(work, variant)
    began = time.perf_counter()
    first = float(training.step(0))
    first_seconds = time.perf_counter() - began
    for number in range(1, 5):
        training.step(number)
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for number in range(work.steps):
            loss = training.step(number)
        last = float(loss)  # which waits for the device
        rounds.append((time.perf_counter() - began) / work.steps)
    seconds = statistics.median(rounds)
    return Measured(
        variant.name,
        seconds,
        (max(rounds) - min(rounds)) / seconds,
        work.batch * work.settings["context"] / seconds,
        torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0,
        first_seconds,
        first,
        last,
        _kernels(training) if CUDA else {},
    )


def _kernels(training: Training) -> dict[str, float]:
    """Seconds of a step by kind of kernel. What is left of the step's time, the GPU did nothing."""
    from torch.profiler import ProfilerActivity, profile

    steps = 3
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for number in range(steps):
            training.step(number)
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in recorded.key_averages():
        kind = _kind(event.key.lower())
        found[kind] = found.get(kind, 0.0) + event.self_device_time_total / 1e6 / steps
    return found


def _kind(kernel: str) -> str:
    words = {
        "attention": ("flash", "fmha", "sdpa", "cudnn_generated"),
        "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "triton_tem", "matmul"),
        "optimizer": ("adam", "multi_tensor", "lpnorm"),
        "copies": ("memcpy", "memset"),
    }
    return next((kind for kind, parts in words.items() if any(part in kernel for part in parts)), "memory-bound")


def ceilings(work: Work) -> list[dict[str, Any]]:
    """How fast this GPU multiplies matrices of the model's own shapes, alone."""
    tokens, width = work.batch * work.settings["context"], work.settings["width"]
    vocabulary, rows = work.settings["vocabulary"], []
    shapes = [
        (tokens, width, 3 * width),
        (tokens, width, width),
        (tokens, width, 4 * width),
        (tokens, 4 * width, width),
    ]
    shapes += [(tokens, width, vocabulary), (tokens, vocabulary, width), (vocabulary, tokens, width)]
    for m, k, n in shapes:
        a, b = (torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
        times = list(_timed(lambda a=a, b=b: a @ b, 5))
        rows.append({"m": m, "k": k, "n": n, "teraflops": 2 * m * k * n / statistics.median(times) / 1e12})
    return rows


def _timed(action: Callable[[], Any], repeats: int) -> Iterator[float]:
    for number in range(repeats + 2):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        action()
        ended.record()
        torch.cuda.synchronize()
        if number >= 2:
            yield began.elapsed_time(ended) / 1000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", choices=WORKS, default="gpt2")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="+", help="Variants whose names have one of these words in them.")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    work = WORKS["small" if asked.small else asked.work]
    chosen = [one for one in VARIANTS if asked.only is None or any(word in one.name for word in asked.only)]
    found: list[Measured] = []
    for variant in (PLAIN, *(one for one in chosen if one != PLAIN), replace(PLAIN, name="as peers do it, again")):
        try:
            found.append(measured(work, variant))
        except Exception as error:  # one variant that a version of torch cannot do is a result too
            print(f"{variant.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        print(json.dumps(asdict(found[-1])), flush=True)
    rates = ceilings(work) if CUDA else []
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        document = {"work": asdict(work), "torch": torch.__version__, "variants": list(map(asdict, found))}
        (asked.out / f"levers-{asked.work}.json").write_text(json.dumps({**document, "ceilings": rates}, indent=1))
    for row in rates:
        print(f"{row['m']:>7} × {row['k']:>6} × {row['n']:>6}: {row['teraflops']:.0f} TFLOP/s")
    _print(found)


def _print(found: Sequence[Measured]) -> None:
    kinds = list(dict.fromkeys(kind for one in found for kind in one.kernel_seconds))
    print(f"| variant | ms | over first | tokens/s | GiB | first step, s | loss | {' | '.join(kinds)} |")
    print("|" + "---|" * (7 + len(kinds)))
    for one in found:
        of_kinds = " | ".join(f"{one.kernel_seconds.get(kind, 0.0) * 1e3:.1f}" for kind in kinds)
        print(
            f"| {one.name} | {one.seconds * 1e3:.2f} ±{one.spread / 2:.1%} | {found[0].seconds / one.seconds:.3f}× "
            f"| {one.tokens_per_second:,.0f} | {one.peak_gib:.2f} | {one.first_step_seconds:.1f} "
            f"| {one.last_loss:.4f} | {of_kinds} |"
        )


if __name__ == "__main__":
    main()
