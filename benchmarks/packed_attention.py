"""Attention inside documents, on this machine's device: is it right, and what does it cost?

    python benchmarks/packed_attention.py                  # on a GPU: some minutes, most of them compilation
    python benchmarks/packed_attention.py --json out.json

First the kernel is compared, forward and backward, with attention under a mask in float32, and a small model's packs
with their documents one by one. Then a GPT of 124 M parameters takes training steps in bf16, compiled block by block as
gradus does: with sequences of one document each, with several documents in each, and with several under a mask in
memory (what a GPU without flex_attention would do). On the CPU everything is small, and no number means anything: it is
there to see that the script runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gradus.models import documents as inside
from gradus.models.gpt import GPT
from gradus.models.settings import GPTSettings
from gradus.parallel.recompute import apply_recompute
from gradus.schema.plan import Plan

# (heads, key-value heads, width of a key, width of a value, tokens): plain, grouped, latent, a length of no whole block
SHAPES = [(12, 12, 64, 64, 1024), (16, 4, 128, 128, 2048), (16, 16, 192, 128, 1024), (12, 12, 64, 64, 1000)]
TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 3e-2}  # of the largest number; products may be in TF32
AVERAGE = 0.25  # of a context: the mean length of a document


def packs(samples: int, context: int, device: torch.device) -> Tensor:
    """Numbers of documents of unequal lengths, four in a sequence on average."""
    draw = torch.Generator().manual_seed(1)
    begins = torch.rand(samples, context, generator=draw) < 1 / (AVERAGE * context)
    return begins.cumsum(1).to(torch.int32).to(device)


def masked(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, causal: bool) -> Tensor:
    with patch.object(inside, "flex_can", lambda *_: False):
        return inside.attend_inside(q, k, v, documents, causal=causal, dropout=0.0)


def with_gradients(attend: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    mixed = attend(*leaves)
    weights = torch.linspace(-1, 1, mixed.shape[-1], device=mixed.device, dtype=mixed.dtype)
    (mixed * weights).sum().backward()
    return [mixed.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compared(device: torch.device, small: bool) -> list[dict[str, Any]]:
    rows = []
    for heads, kv_heads, width, value_width, tokens in SHAPES:
        if small:
            heads, kv_heads, tokens = 4, 4 * kv_heads // heads, tokens // 8
        torch.compiler.reset()  # for one function, torch compiles only so many shapes
        documents = packs(2, tokens, device)
        sizes = [(heads, width), (kv_heads, width), (kv_heads, value_width)]
        whole = [torch.randn(2, h, tokens, w, device=device) for h, w in sizes]
        for dtype in (torch.float32, torch.bfloat16):
            for causal in (True, False):
                given = [t.to(dtype) for t in whole]
                found = with_gradients(
                    lambda q, k, v: inside.attend_inside(q, k, v, documents, causal=causal, dropout=0.0),  # noqa: B023
                    given,
                )
                exact = [t.float() for t in given]
                wanted = with_gradients(lambda q, k, v: masked(q, k, v, documents, causal), exact)  # noqa: B023
                error = max(
                    float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)
                )
                shape = f"{heads}/{kv_heads} heads of {width}/{value_width}, {tokens} tokens"
                row = {"shape": shape, "dtype": str(dtype), "causal": causal, "error": error}
                row["right"] = error < TOLERANCE[dtype]
                rows.append(row)
                verdict = "" if row["right"] else "WRONG"
                print(f"{shape:<40} {dtype!s:<15} causal {causal!s:<5} error {error:.1e} {verdict}")
    return rows


def whole_model(device: torch.device, how: str) -> dict[str, Any]:
    """Gradients of packs against those of their documents one by one, in float32, as blocks are run by gradus."""
    torch.manual_seed(1)
    settings = GPTSettings(layers=2, width=128, heads=4, kv_heads=2, context=256, vocabulary=512, positions="rotary")
    with device:
        model = GPT(settings)
    tokens = torch.randint(512, (4, 256), device=device)
    documents = packs(4, 256, device)
    alone = [
        tokens[row, documents[row] == number][None] for row in range(4) for number in documents[row].unique().tolist()
    ]
    model_loss(model, [(one, None) for one in alone]).backward()
    wanted = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    if how.startswith("recompute"):
        apply_recompute(model, Plan(recompute=how.removeprefix("recompute ")))  # type: ignore[arg-type]
    if how == "compiled":
        for block in model.blocks:
            block.compile()
    model_loss(model, [(tokens, documents)]).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
    row = {"shape": f"a model, {how}", "error": error, "right": error < TOLERANCE[torch.float32]}
    print(f"{row['shape']:<40} gradients' error {error:.1e} {'' if row['right'] else 'WRONG'}")
    return row


def model_loss(model: GPT, batches: list[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Each token is asked for itself, so that targets need no care at borders."""
    sums = [model(tokens, tokens, documents).loss_sum for tokens, documents in batches]  # type: ignore[union-attr]
    return torch.stack(sums).sum()


def speed(device: torch.device, small: bool, kind: str, positions: str) -> dict[str, Any]:
    size = (
        {"layers": 2, "width": 64, "heads": 4, "context": 128} if small else {"layers": 12, "width": 768, "heads": 12}
    )
    settings = GPTSettings(**{"context": 1024, "vocabulary": 50304, **size, "positions": positions})  # type: ignore[arg-type]
    with device:
        model = GPT(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    if not small:
        for part in (model.embedding, *model.blocks, model.head):
            part.compile()
    samples, steps, warm = (2, 2, 1) if small else (32, 20, 5)
    tokens = torch.randint(settings.vocabulary, (samples, settings.context), device=device)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    if kind != "one document":
        batch["documents"] = packs(samples, settings.context, device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            output = model(**batch)
        (output.loss_sum / output.count).backward()
        optimizer.step()
        optimizer.zero_grad()

    can = inside.flex_can if kind != "documents, mask" else lambda *_: False
    with patch.object(inside, "flex_can", can):
        for _ in range(warm):
            step()
        synchronise(device)
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        synchronise(device)
        seconds = (time.perf_counter() - begin) / steps
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    row = {"kind": kind, "positions": positions, "tokens_per_second": tokens.numel() / seconds, "peak_gib": peak}
    memory = "" if peak is None else f", peak {peak:.1f} GiB"
    print(f"{kind:<16} {positions:<8} {row['tokens_per_second']:>12,.0f} tokens/s{memory}")
    return row


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = device.type == "cpu"
    name = "CPU" if small else torch.cuda.get_device_name(device)
    print(f"torch {torch.__version__}, {name}")
    errors = compared(device, small)
    for how in ("eager", "compiled", "recompute full", "recompute selective"):
        torch.compiler.reset()
        inside._compiled.cache_clear()
        errors.append(whole_model(device, how))
    speeds = []
    for positions in ("learned", "rotary"):
        for kind in ("one document", "documents", "documents, mask"):
            torch.compiler.reset()
            inside._compiled.cache_clear()
            if not small:
                torch.cuda.reset_peak_memory_stats(device)
            speeds.append(speed(device, small, kind, positions))
    if arguments.json:
        document = {"torch": torch.__version__, "device": name, "errors": errors, "speeds": speeds}
        arguments.json.write_text(json.dumps(document, indent=1))
    return 0 if all(row["right"] for row in errors) else 1


if __name__ == "__main__":
    raise SystemExit(main())
