"""How fast one GPU really is: what the planner's figures in src/gradus/hardware/speeds.yaml rest on.

python benchmarks/gpu_speeds.py [--small] [--only matmul,attention] [--limit-seconds 100]

Needs torch and nothing else. Prints a table and writes every row to gpu_speeds.json in --out.
`--small` runs everything in tiny form, on a CPU too, which shows that the script works and nothing about speed.

Times of the device are between two CUDA events, with the launches queued behind a kernel that sleeps, so that the host
is never what is measured; times of the host are those of launching kernels on tensors of a few bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
MIB = 2**20
SAMPLES = 5  # of which the median counts
SAMPLE_SECONDS = 2e-3  # a sample is as many calls as take about so long on the device
MOST_CALLS = 100  # of a sample: the driver's queue holds about a thousand launches, and a call may be several


class Rows:
    """What was measured, written to a file after each section, so that a run that is cut short leaves what it has."""

    def __init__(self, path: Path, small: bool) -> None:
        self.path = path
        self.small = small
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def add(self, section: str, name: str, seconds: float, **facts: Any) -> None:
        self.rows.append({"section": section, "name": name, "seconds": seconds, **facts})
        shown = " ".join(f"{key}={value}" for key, value in facts.items() if key not in ("flops", "bytes"))
        rate = ""
        if facts.get("flops"):
            rate += f" {facts['flops'] / seconds / 1e12:8.1f} TFLOP/s"
        if facts.get("bytes"):
            rate += f" {facts['bytes'] / seconds / 1e9:8.1f} GB/s"
        print(f"{section:<11} {name:<26} {seconds * 1e6:11.2f} us{rate}  {shown}", flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"note: {text}", flush=True)

    def write(self) -> None:
        facts = {
            "device": torch.cuda.get_device_name(DEVICE) if CUDA else "CPU",
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "small": self.small,
            "notes": self.notes,
            "rows": self.rows,
        }
        if CUDA:
            facts["multiprocessors"] = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        self.path.write_text(json.dumps(facts))


def device_seconds(call: Callable[[], object], *, samples: int = SAMPLES) -> float:
    """The median time of a call on the device, however long the host takes to launch it."""
    if not CUDA:
        call()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    calls = max(1, min(MOST_CALLS, round(SAMPLE_SECONDS / max(whole, 1e-6))))
    found = []
    for _ in range(samples):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(2e9 * min(0.05, 2 * calls * host)))  # about 2 GHz: twice as long as the host needs
        first.record()
        for _ in range(calls):
            call()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) / 1e3 / calls)
    return statistics.median(found)


def host_seconds(call: Callable[[], object], calls: int = 300) -> float:
    """The median time that the host needs for a call, the device being idle or nearly so."""
    for _ in range(10):
        call()
    found = []
    for _ in range(SAMPLES):
        if CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls)
    if CUDA:
        torch.cuda.synchronize()
    return statistics.median(found)


def use_tf32(on: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on


def drawn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype).requires_grad_(grad)


def matmul_shapes(small: bool) -> Iterator[tuple[str, int, int, int]]:
    """(what it is, m, n, k). Layers are (tokens, out, in): forward; their two backward products have the same three."""
    if small:
        yield from (("square", 64, 64, 64), ("layer", 128, 96, 32))
        return
    for size in (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288):
        yield "square", size, size, size
    for k in (64, 128, 256, 512, 1024, 2048, 4096, 16384):  # how long the inner product must be
        yield "inner", 4096, 4096, k
    for m in (1, 16, 64, 128, 256, 512, 1024, 2048):  # few rows
        yield "rows", m, 4096, 4096
    for n in (8, 16, 32, 64, 128, 256, 512):  # few columns
        yield "columns", 8192, n, 4096
    for tokens in (2048, 8192, 32768):  # GPT-2 124M
        for n, k in ((2304, 768), (768, 768), (3072, 768), (768, 3072), (50304, 768)):
            yield "124m", tokens, n, k
    for n, k in ((768, 32768), (2304, 32768), (3072, 32768)):  # its weight gradients
        yield "124m wgrad", 768, n, k
    for tokens in (2048, 16384):
        for n, k in ((6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (50304, 2048)):
            yield "1.3b", tokens, n, k
    for n, k in ((2048, 16384), (8192, 16384)):
        yield "1.3b wgrad", 2048, n, k
    for tokens in (2048, 8192):
        for n, k in ((12288, 4096), (4096, 4096), (22016, 4096), (11008, 4096), (4096, 11008), (32000, 4096)):
            yield "7b", tokens, n, k
    for m, n, k in ((4096, 4160, 4096), (4096, 4224, 4096), (4224, 4224, 4096), (4097, 4096, 4096), (1000, 1000, 1000)):
        yield "uneven", m, n, k


LAYOUTS = {"nn": (False, False), "nt": (False, True), "tn": (True, False)}  # forward is nt, dgrad nn, wgrad tn


def measure_matmul(rows: Rows) -> None:
    for precision, dtype in DTYPES.items():
        use_tf32(precision == "tf32")
        for name, m, n, k in matmul_shapes(rows.small):
            if precision != "bf16" and name in ("7b", "124m wgrad", "1.3b wgrad") and not rows.small:
                continue
            if precision == "fp32" and m * n * k > 3e11:
                continue
            layouts = ("nt", "nn", "tn") if precision == "bf16" and name in ("124m", "1.3b", "square") else ("nt",)
            for layout in layouts:
                turn_a, turn_b = LAYOUTS[layout]
                a = drawn(k, m, dtype=dtype).t() if turn_a else drawn(m, k, dtype=dtype)
                b = drawn(n, k, dtype=dtype).t() if turn_b else drawn(k, n, dtype=dtype)
                out = torch.empty(m, n, device=DEVICE, dtype=dtype)
                seconds = device_seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), samples=3)
                rows.add("matmul", name, seconds, dtype=precision, m=m, n=n, k=k, layout=layout, flops=2.0 * m * n * k)
                del a, b, out
    use_tf32(False)


def measure_bmm(rows: Rows) -> None:
    shapes = [(4, 32, 32, 16)] if rows.small else []
    if not rows.small:
        for width in (64, 128):
            for batch, tokens in ((384, 1024), (64, 2048), (768, 512), (384, 197)):
                shapes += [(batch, tokens, tokens, width), (batch, tokens, width, tokens)]
        shapes += [(8, 2048, 4096, 1024), (64, 256, 256, 256), (1024, 64, 64, 64)]
    for precision in ("bf16", "tf32", "fp32"):
        use_tf32(precision == "tf32")
        for batch, m, n, k in shapes:
            a, b = drawn(batch, m, k, dtype=DTYPES[precision]), drawn(batch, k, n, dtype=DTYPES[precision])
            seconds = device_seconds(lambda a=a, b=b: torch.bmm(a, b), samples=3)
            flops, moved = 2.0 * batch * m * n * k, a.element_size() * batch * (m * k + k * n + m * n)
            rows.add("bmm", "bmm", seconds, dtype=precision, batch=batch, m=m, n=n, k=k, flops=flops, bytes=moved)
    use_tf32(False)


def measure_fp8(rows: Rows) -> None:
    if not CUDA or torch.cuda.get_device_capability() < (8, 9):
        rows.note("fp8 left out: the device has none")
        return
    one = torch.ones((), device=DEVICE)
    shapes = [(64, 64, 64)] if rows.small else []
    if not rows.small:
        shapes = [(size, size, size) for size in (512, 1024, 2048, 4096, 8192)]
        shapes += [(16384, n, k) for n, k in ((6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192))]
        shapes += [(8192, n, k) for n, k in ((12288, 4096), (4096, 4096), (11008, 4096), (4096, 11008))]
    for m, n, k in shapes:
        a, b = drawn(m, k).to(torch.float8_e4m3fn), drawn(n, k).to(torch.float8_e4m3fn).t()
        for fast in (True, False):

            def call(a: Tensor = a, b: Tensor = b, fast: bool = fast) -> Tensor:
                return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

            rows.add("fp8", "scaled_mm", device_seconds(call), m=m, n=n, k=k, fast=fast, flops=2.0 * m * n * k)
    x = drawn(1024 if rows.small else 16384, 64 if rows.small else 4096, dtype=torch.bfloat16)
    for name, call in {
        "amax": lambda: x.abs().max(),
        "scale and cast": lambda: (x.float() * one).clamp(-448, 448).to(torch.float8_e4m3fn),
        "cast": lambda: x.to(torch.float8_e4m3fn),
    }.items():
        rows.add("fp8", name, device_seconds(call), elements=x.numel(), bytes=2.0 * x.numel())


def measure_attention(rows: Rows) -> None:
    flash, efficient, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
    cases: list[tuple[str, SDPBackend, str, int, int, int, int, bool, bool, float]] = []
    if rows.small:
        cases = [("math", SDPBackend.MATH, "fp32", 2, 2, 32, 16, True, False, 0.0)]
    else:
        for width in (64, 128):
            for batch, tokens in ((64, 512), (32, 1024), (8, 2048), (4, 4096), (2, 8192)):
                heads = 768 // width if tokens <= 1024 else 2048 // width
                for causal in (True, False):
                    for name, backend in (("flash", flash), ("cudnn", cudnn)):
                        cases.append((name, backend, "bf16", batch, heads, tokens, width, causal, False, 0.0))
        for name, backend in (("flash", flash), ("cudnn", cudnn)):
            cases += [(name, backend, "bf16", 64, 12, 197, 64, False, False, 0.0)]
            cases += [(name, backend, "bf16", 256, 12, 128, 64, False, False, 0.0)]
            cases += [(name, backend, "bf16", 2, 16, 2048, 128, True, False, 0.0)]
            cases += [(name, backend, "bf16", 8, 16, 2048, 256, True, False, 0.0)]
            cases += [(name, backend, "bf16", 8, 16, 2048, 80, True, False, 0.0)]
        cases += [("cudnn", cudnn, "bf16", 64, 12, 512, 64, False, True, 0.0)]
        cases += [("flash dropout", flash, "bf16", 32, 12, 1024, 64, True, False, 0.1)]
        cases += [("efficient", efficient, "fp32", 32, 12, 1024, 64, causal, False, 0.0) for causal in (True, False)]
        cases += [("efficient tf32", efficient, "tf32", 32, 12, 1024, 64, True, False, 0.0)]
        cases += [("efficient", efficient, "fp32", 32, 12, 512, 64, False, True, 0.0)]
        cases += [("efficient", efficient, "bf16", 32, 12, 1024, 64, causal, False, 0.0) for causal in (True, False)]
        cases += [("efficient", efficient, "bf16", 64, 12, 512, 64, False, True, 0.0)]
        cases += [("efficient", efficient, "bf16", 8, 16, 2048, 128, True, False, 0.0)]
    for name, backend, precision, batch, heads, tokens, width, causal, masked, dropout in cases:
        use_tf32(precision == "tf32")
        dtype = DTYPES[precision]
        q, k, v = (drawn(batch, heads, tokens, width, dtype=dtype, grad=True) for _ in range(3))
        mask = drawn(batch, 1, tokens, tokens, dtype=dtype) if masked else None
        flops = 4.0 * batch * heads * tokens * tokens * width * (0.5 if causal else 1.0)
        facts: dict[str, Any] = {"dtype": precision, "batch": batch, "heads": heads, "tokens": tokens, "width": width}
        facts |= {"causal": causal, "mask": masked, "dropout": dropout}

        def forward(
            q: Tensor = q,
            k: Tensor = k,
            v: Tensor = v,
            mask: Tensor | None = mask,
            c: bool = causal,
            p: float = dropout,
        ) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=c, dropout_p=p)

        try:
            with sdpa_kernel(backend):
                rows.add("attention", f"{name} forward", device_seconds(forward), **facts, flops=flops)
                out = forward()
            grad = torch.randn_like(out)

            def backward(out: Tensor = out, given: tuple[Tensor, ...] = (q, k, v), grad: Tensor = grad) -> object:
                return torch.autograd.grad(out, given, grad, retain_graph=True)

            rows.add("attention", f"{name} backward", device_seconds(backward), **facts, flops=2.5 * flops)
        except RuntimeError as error:
            rows.note(f"attention {name} {facts}: {str(error).splitlines()[0]}")
    use_tf32(False)


def measure_pointwise(rows: Rows) -> None:
    sizes = [2**16, 2**18] if rows.small else [2**n for n in range(16, 32)]  # bytes of the input
    for size in sizes:
        for precision in ("bf16", "fp32") if size >= 2**24 or rows.small else ("bf16",):
            x = drawn(size // DTYPES[precision].itemsize, dtype=DTYPES[precision])
            y, out = torch.empty_like(x), torch.empty_like(x)
            for name, factor, call in (
                ("copy", 2.0, lambda x=x, out=out: out.copy_(x)),
                ("add", 3.0, lambda x=x, y=y, out=out: torch.add(x, y, out=out)),
                ("gelu", 2.0, lambda x=x: F.gelu(x)),
            ):
                rows.add("pointwise", name, device_seconds(call), dtype=precision, size=size, bytes=factor * size)
            del x, y, out
        if CUDA:
            torch.cuda.empty_cache()
    size = 2**18 if rows.small else 2**28
    wide, narrow = drawn(size // 4), drawn(size // 2, dtype=torch.bfloat16)
    mask = torch.rand(size // 2, device=DEVICE) > 0.1
    side = 64 if rows.small else 4096
    square = drawn(size // 2 // side, side, dtype=torch.bfloat16)
    cases: dict[str, tuple[float, Callable[[], object]]] = {
        "cast fp32 to bf16": (6.0 * wide.numel(), lambda: wide.to(torch.bfloat16)),
        "cast bf16 to fp32": (6.0 * narrow.numel(), lambda: narrow.float()),
        "fill": (2.0 * narrow.numel(), lambda: narrow.zero_()),
        "dropout": (5.0 * narrow.numel(), lambda: torch.native_dropout(narrow, 0.1, True)),
        "where": (5.0 * narrow.numel(), lambda: torch.where(mask, narrow, 0.0)),
        "mul by mask": (5.0 * narrow.numel(), lambda: narrow * mask),
        "transpose copy": (4.0 * square.numel(), lambda: square.t().contiguous()),
        "broadcast add": (4.0 * square.numel(), lambda: square + square[0]),
        "relu": (4.0 * narrow.numel(), lambda: torch.relu(narrow)),
        "silu": (4.0 * narrow.numel(), lambda: F.silu(narrow)),
        "tanh": (4.0 * narrow.numel(), lambda: torch.tanh(narrow)),
        "rand": (2.0 * narrow.numel(), lambda: narrow.uniform_()),
        "randn": (4.0 * wide.numel(), lambda: wide.normal_()),
        "sum": (4.0 * wide.numel(), lambda: wide.sum()),
        "sum of columns": (2.0 * square.numel(), lambda: square.sum(0)),
        "sum of rows": (2.0 * square.numel(), lambda: square.sum(1)),
        "cat": (4.0 * square.numel(), lambda: torch.cat([square[: side // 2], square[side // 2 :]])),
    }
    for name, (moved, call) in cases.items():
        rows.add("pointwise", name, device_seconds(call), bytes=moved)


def forward_and_backward(
    rows: Rows, section: str, name: str, call: Callable[[], Tensor], given: list[Tensor], **facts: Any
) -> None:
    """Time a function of tensors, and its backward alone. `forward_bytes` and `backward_bytes` of `facts` are moved."""
    moved = facts.pop("forward_bytes", None), facts.pop("backward_bytes", None)
    with torch.no_grad():
        rows.add(section, f"{name} forward", device_seconds(call), **facts, bytes=moved[0])
    out = call()
    grad = torch.randn_like(out)

    def backward() -> object:
        return torch.autograd.grad(out, given, grad, retain_graph=True)

    rows.add(section, f"{name} backward", device_seconds(backward), **facts, bytes=moved[1])


def measure_layers(rows: Rows) -> None:
    tokens = 256 if rows.small else 32768
    for width in (64,) if rows.small else (768, 2048, 8192):
        for precision in ("bf16", "fp32"):
            dtype = DTYPES[precision]
            n = tokens * width * 768 // max(width, 768) if not rows.small else tokens * width
            x = drawn(n // width, width, dtype=dtype, grad=True)
            weight, bias = drawn(width, dtype=dtype, grad=True), drawn(width, dtype=dtype, grad=True)
            size = x.element_size() * x.numel()
            facts = {"dtype": precision, "width": width, "elements": x.numel()}
            moved = {"forward_bytes": 2.0 * size, "backward_bytes": 3.0 * size}
            forward_and_backward(
                rows, "layers", "layer_norm", lambda x=x, w=weight, b=bias, d=width: F.layer_norm(x, (d,), w, b),
                [x, weight, bias], **facts, **moved,
            )  # fmt: skip
            forward_and_backward(
                rows,
                "layers",
                "rms_norm",
                lambda x=x, w=weight, d=width: F.rms_norm(x, (d,), w),
                [x, weight],
                **facts,
                **moved,
            )
            forward_and_backward(rows, "layers", "softmax", lambda x=x: torch.softmax(x, -1), [x], **facts, **moved)
            forward_and_backward(rows, "layers", "gelu", lambda x=x: F.gelu(x), [x], **facts, **moved)
    vocabulary, tokens = (512, 64) if rows.small else (50304, 8192)
    for precision in ("bf16", "fp32"):
        logits = drawn(tokens, vocabulary, dtype=DTYPES[precision], grad=True)
        targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
        size = logits.element_size() * logits.numel()
        forward_and_backward(
            rows, "layers", "cross_entropy", lambda x=logits, t=targets: F.cross_entropy(x, t), [logits],
            dtype=precision, elements=logits.numel(), forward_bytes=2.0 * size, backward_bytes=2.0 * size,
        )  # fmt: skip
        del logits
    for width in (32,) if rows.small else (768, 2048):
        tokens = 256 if rows.small else 32768
        table = drawn(vocabulary, width, grad=True)
        ids = torch.randint(vocabulary, (tokens,), device=DEVICE)
        forward_and_backward(
            rows, "layers", "embedding", lambda w=table, i=ids: F.embedding(i, w), [table], dtype="fp32", tokens=tokens,
            width=width, vocabulary=vocabulary, forward_bytes=8.0 * tokens * width,
            backward_bytes=4.0 * (vocabulary + 2 * tokens) * width,
        )  # fmt: skip
    for precision in ("fp32", "bf16"):
        for layout in (torch.contiguous_format, torch.channels_last):
            for channels, side in ((4, 8),) if rows.small else ((64, 112), (256, 56), (2048, 7)):
                x = drawn(4 if rows.small else 64, channels, side, side, dtype=DTYPES[precision])
                x = x.to(memory_format=layout).requires_grad_()
                weight, bias = drawn(channels, grad=True), drawn(channels, grad=True)
                size = x.element_size() * x.numel()
                forward_and_backward(
                    rows, "layers", "batch_norm",
                    lambda x=x, w=weight, b=bias: F.batch_norm(x, None, None, w, b, training=True), [x, weight, bias],
                    dtype=precision, channels=channels, side=side, channels_last=layout is torch.channels_last,
                    forward_bytes=3.0 * size, backward_bytes=5.0 * size,
                )  # fmt: skip
            forward_and_backward(
                rows, "layers", "group_norm", lambda x=x: F.group_norm(x, 4 if rows.small else 32), [x],
                dtype=precision, channels=channels, side=side, channels_last=layout is torch.channels_last,
                forward_bytes=3.0 * size, backward_bytes=5.0 * size,
            )  # fmt: skip
            count, side = (4, 8) if rows.small else (64, 112)
            x = drawn(count, count, side, side, dtype=DTYPES[precision]).to(memory_format=layout).requires_grad_()
            size = x.element_size() * x.numel()
            forward_and_backward(
                rows, "layers", "max_pool", lambda x=x: F.max_pool2d(x, 3, 2, 1), [x], dtype=precision,
                channels_last=layout is torch.channels_last, forward_bytes=1.5 * size, backward_bytes=1.5 * size,
            )  # fmt: skip


# (name, input channels, output channels, kernel, stride, side of the input, groups)
CONVOLUTIONS = [
    ("stem", 3, 64, 7, 2, 224, 1),
    ("56 1x1 up", 64, 256, 1, 1, 56, 1),
    ("56 3x3", 64, 64, 3, 1, 56, 1),
    ("56 1x1 stride", 256, 512, 1, 2, 56, 1),
    ("28 3x3", 128, 128, 3, 1, 28, 1),
    ("14 3x3", 256, 256, 3, 1, 14, 1),
    ("14 1x1 down", 1024, 256, 1, 1, 14, 1),
    ("7 3x3", 512, 512, 3, 1, 7, 1),
    ("64 3x3 wide", 320, 320, 3, 1, 64, 1),
    ("32 3x3 small", 64, 128, 3, 1, 16, 1),
    ("patches", 3, 768, 16, 16, 224, 1),
    ("depthwise", 96, 96, 7, 1, 56, 96),
]


def measure_convolutions(rows: Rows) -> None:
    torch.backends.cudnn.benchmark = True  # as training here has it
    first, last = torch.contiguous_format, torch.channels_last
    variants = [("fp32", first), ("tf32", first), ("bf16", last), ("bf16", first)]
    for precision, layout in variants:
        use_tf32(precision == "tf32")
        dtype = DTYPES[precision]
        for name, inner, outer, kernel, stride, side, groups in CONVOLUTIONS[:1] if rows.small else CONVOLUTIONS:
            batch, side = (2, 32) if rows.small else (64, side)
            x = drawn(batch, inner, side, side, dtype=dtype).to(memory_format=layout)
            w = drawn(outer, inner // groups, kernel, kernel, dtype=dtype).to(memory_format=layout)
            padding = 0 if kernel == stride else kernel // 2
            y = F.conv2d(x, w, stride=stride, padding=padding, groups=groups)
            grad = torch.randn_like(y)
            flops = 2.0 * y.numel() * inner // groups * kernel * kernel
            facts = {"dtype": precision, "channels_last": layout is last, "batch": batch, "groups": groups}
            facts |= {"matmul": [y.numel() // outer, outer // groups, inner // groups * kernel * kernel]}
            moved = float(x.element_size() * (x.numel() + w.numel() + y.numel()))

            def forward(x: Tensor = x, w: Tensor = w, s: int = stride, p: int = padding, g: int = groups) -> Tensor:
                return F.conv2d(x, w, stride=s, padding=p, groups=g)

            rows.add(
                "convolution", f"{name} forward", device_seconds(forward, samples=3), **facts, flops=flops, bytes=moved
            )
            for direction, wanted in (("input", [True, False, False]), ("weight", [False, True, False])):
                if direction == "input" and inner == 3:
                    continue  # images need no gradient

                def backward(
                    x: Tensor = x, w: Tensor = w, grad: Tensor = grad, s: int = stride, p: int = padding,
                    g: int = groups, wanted: list[bool] = wanted,
                ) -> object:  # fmt: skip
                    return torch.ops.aten.convolution_backward(
                        grad, x, w, None, [s, s], [p, p], [1, 1], False, [0, 0], g, wanted
                    )

                seconds = device_seconds(backward, samples=3)
                rows.add("convolution", f"{name} {direction}", seconds, **facts, flops=flops, bytes=moved)
    use_tf32(False)
    torch.backends.cudnn.benchmark = False


def measure_optimizer(rows: Rows) -> None:
    """By total elements and by number of tensors: what a step costs for each of either."""
    cases = (
        [(4, 1000), (40, 1000)]
        if rows.small
        else [(1, 2**27), (8, 2**26), (148, 2**20), (148, 256), (600, 256), (600, 2**20)]
    )
    for tensors, elements in cases:
        parameters = [torch.zeros(elements, device=DEVICE, requires_grad=True) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        made: dict[str, tuple[float, torch.optim.Optimizer]] = {
            "adamw": (28.0, torch.optim.AdamW(parameters, lr=1e-3, fused=CUDA)),
            "sgd": (20.0, torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=CUDA)),
            "adadelta": (44.0, torch.optim.Adadelta(parameters, lr=1e-3)),
        }
        for name, (bytes_each, optimizer) in made.items():
            facts = {"tensors": tensors, "elements": tensors * elements, "bytes": bytes_each * tensors * elements}
            rows.add("optimizer", name, device_seconds(optimizer.step), **facts)
            if elements <= 1000:
                rows.add("optimizer", f"{name} host", host_seconds(optimizer.step, calls=20), tensors=tensors)
            optimizer.state.clear()
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        facts = {"tensors": tensors, "elements": tensors * elements}
        factor = torch.ones((), device=DEVICE)
        for name, bytes_each, call in (
            ("norm", 4.0, lambda grads=grads: nn.utils.get_total_norm(grads)),
            ("scale", 8.0, lambda grads=grads, factor=factor: torch._foreach_mul_(grads, factor)),
        ):
            moved = bytes_each * tensors * elements
            rows.add("optimizer", name, device_seconds(call), **facts, bytes=moved)
            if elements <= 1000:
                rows.add("optimizer", f"{name} host", host_seconds(call, calls=20), **facts)
        del parameters, made, grads


class Counting(TorchDispatchMode):
    """Counts operators that reach the device or only make a view."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            self.views += 1
        else:
            self.kernels += 1
        return func(*args, **(kwargs or {}))


class TinyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in self.qkv(self.one(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.two(x))))
        return y


def tiny_models() -> dict[str, tuple[nn.Module, Tensor]]:
    blocks = nn.Sequential(*(TinyBlock() for _ in range(12))).to(DEVICE)
    layers: list[nn.Module] = []
    for _ in range(20):
        layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    mlp = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(30))).to(DEVICE)
    return {
        "transformer": (blocks, drawn(2, 16, 64)),
        "convolutions": (nn.Sequential(*layers).to(DEVICE), drawn(2, 16, 8, 8)),
        "mlp": (mlp, drawn(4, 32)),
    }


def measure_host(rows: Rows) -> None:
    """What the host needs to launch an operator, forward and backward, and what the device needs at least."""
    x, y = drawn(16, 16), drawn(16, 16)
    gx = drawn(16, 16, grad=True)
    rows.add("host", "floor on the device: add", device_seconds(lambda: torch.add(x, y)))
    rows.add("host", "floor on the device: mm", device_seconds(lambda: torch.mm(x, y)))
    rows.add("host", "floor on the device: norm", device_seconds(lambda: F.layer_norm(x, (16,))))
    layer, norm = nn.Linear(16, 16).to(DEVICE), nn.LayerNorm(16).to(DEVICE)
    image, convolution = drawn(2, 8, 8, 8), nn.Conv2d(8, 8, 3).to(DEVICE)
    q = drawn(2, 2, 16, 32, dtype=torch.bfloat16, grad=True)

    def cast_linear() -> Tensor:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            out: Tensor = layer(gx)
            return out

    for name, call in {
        "add, no gradient": lambda: torch.add(x, y),
        "add": lambda: torch.add(gx, y),
        "view": lambda: gx.view(-1),
        "linear": lambda: layer(gx),
        "linear, autocast": cast_linear,
        "layer_norm": lambda: norm(gx),
        "gelu": lambda: F.gelu(gx),
        "conv2d": lambda: convolution(image),
        "sdpa": lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        "dropout": lambda: F.dropout(gx, 0.1),
    }.items():
        rows.add("host", f"forward: {name}", host_seconds(call))
    for precision in ("fp32", "bf16"):
        for name, (model, given) in tiny_models().items():

            def forward(model: nn.Module = model, given: Tensor = given, cast: bool = precision == "bf16") -> Tensor:
                with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=cast):
                    out: Tensor = model(given)
                return out.float().square().mean()

            counts = []
            loss = None
            for part in ("forward", "backward"):
                with Counting() as counting:
                    if part == "forward":
                        loss = forward()
                    else:
                        assert loss is not None
                        loss.backward()
                counts.append({"kernels": counting.kernels, "views": counting.views})
            times: dict[str, list[float]] = {"forward": [], "backward": [], "device": []}
            for repetition in range(4 if rows.small else 15):
                model.zero_grad(set_to_none=True)
                if CUDA:
                    torch.cuda.synchronize()
                start = time.perf_counter()
                loss = forward()
                middle = time.perf_counter()
                loss.backward()
                end = time.perf_counter()
                if repetition >= 3:
                    times["forward"].append(middle - start)
                    times["backward"].append(end - middle)
            for part, count in zip(("forward", "backward"), counts, strict=True):
                rows.add("host", f"{name} {part}", statistics.median(times[part]), dtype=precision, **count)
    if CUDA:
        graph = torch.cuda.CUDAGraph()
        static = drawn(16, 16)
        with torch.cuda.graph(graph):
            for _ in range(200):
                static = static + 1.0
        rows.add("host", "graph of 200 adds: host", host_seconds(graph.replay, calls=20))
        rows.add("host", "graph of 200 adds: device", device_seconds(graph.replay))


def measure_copies(rows: Rows) -> None:
    for size in (MIB,) if rows.small else (MIB // 16, MIB, 16 * MIB, 256 * MIB):
        there = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        for pinned in (True, False) if CUDA else (False,):
            here = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            for name, call in {
                "to the device": lambda here=here, there=there: there.copy_(here, non_blocking=True),
                "to the host": lambda here=here, there=there: here.copy_(there, non_blocking=True),
            }.items():
                if CUDA:
                    call(), torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(3):
                    call()
                if CUDA:
                    torch.cuda.synchronize()
                rows.add("copies", name, (time.perf_counter() - start) / 3, pinned=pinned, size=size, bytes=float(size))


def measure_recurrent(rows: Rows) -> None:
    for precision in ("fp32", "tf32", "bf16"):
        use_tf32(precision == "tf32")
        for layers, width, batch, tokens in (
            ((1, 32, 2, 8),) if rows.small else ((2, 1024, 64, 256), (2, 650, 20, 35), (1, 512, 256, 100))
        ):
            dtype = DTYPES[precision]
            lstm = nn.LSTM(width, width, layers, batch_first=True).to(DEVICE, dtype)
            x = drawn(batch, tokens, width, dtype=dtype, grad=True)
            flops = 2.0 * layers * batch * tokens * 8 * width * width
            facts = {"dtype": precision, "layers": layers, "width": width, "batch": batch, "tokens": tokens}
            rows.add(
                "recurrent", "lstm forward", device_seconds(lambda m=lstm, x=x: m(x), samples=3), **facts, flops=flops
            )
            out = lstm(x)[0]
            grad = torch.randn_like(out)

            def backward(
                out: Tensor = out, given: tuple[Tensor, ...] = (x, *lstm.parameters()), grad: Tensor = grad
            ) -> object:
                return torch.autograd.grad(out, given, grad, retain_graph=True)

            rows.add("recurrent", "lstm backward", device_seconds(backward, samples=3), **facts, flops=2 * flops)
    use_tf32(False)


# In the order of what the planner needs most, should time run out.
SECTIONS: dict[str, Callable[[Rows], None]] = {
    "host": measure_host,
    "matmul": measure_matmul,
    "pointwise": measure_pointwise,
    "attention": measure_attention,
    "layers": measure_layers,
    "optimizer": measure_optimizer,
    "fp8": measure_fp8,
    "bmm": measure_bmm,
    "copies": measure_copies,
    "convolution": measure_convolutions,
    "recurrent": measure_recurrent,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--limit-seconds", type=float, default=100.0)
    parser.add_argument("--out", type=Path, default=Path("."))
    given = parser.parse_args()
    rows = Rows(given.out / "gpu_speeds.json", given.small)
    begin = time.perf_counter()
    for name in given.only.split(","):
        if time.perf_counter() - begin > given.limit_seconds:
            rows.note(f"{name} left out: no time left")
            continue
        start = time.perf_counter()
        try:
            SECTIONS[name](rows)
        except Exception as error:  # a section that fails must not cost the others
            rows.note(f"{name} failed: {type(error).__name__}: {str(error).splitlines()[0]}")
            if given.small:
                raise
        rows.write()
        if CUDA:
            torch.cuda.empty_cache()
        print(f"-- {name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
