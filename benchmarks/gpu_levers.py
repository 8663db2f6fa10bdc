"""What each lever does to a training step: one variant after the other, with where the GPU's time went.

    python benchmarks/gpu_levers.py [--work gpt2|gpt-1.3b|llama-3b|resnet50|tiny] [--only WORD ...] [--out FOLDER]
    python benchmarks/gpu_levers.py --small [--work ...]     # a quick check that it runs, on any machine

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bias_sums import passes_with_sums
from kernel_times import kernel_times
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradus.models import catalogue
from gradus.training.compilation import compile_part, parts_to_compile, set_apart
from gradus.training.graph_passes import with_graph_passes
from gradus.training.loss_placement import chunk_loss

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
ROUNDS = 3
CHEAP_BANS = (
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
    "ban_recompute_materialized_backward",
)
PROFILED = 3  # steps


@dataclass(frozen=True)
class Work:
    """A model of the catalogue and the samples of one step."""

    use: str
    settings: dict[str, Any]
    batch: int
    steps: int  # of a round
    small: dict[str, Any]  # settings for a machine without a GPU

    @property
    def text(self) -> bool:
        return self.use == "gpt"

    def samples(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Of so many steps, on the device."""
        generator = torch.Generator().manual_seed(1)
        if self.text:
            shape = (count, self.batch, self.settings["context"] + 1)
            tokens = torch.randint(0, self.settings["vocabulary"], shape, generator=generator).to(DEVICE)
            return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in tokens]
        side = 32 if self.use == "simple-cnn" or self.settings.get("small_input") else 224
        images = torch.randn(count, self.batch, 3, side, side, generator=generator)
        labels = torch.randint(0, 10, (count, self.batch), generator=generator)
        channels_last = [one.to(DEVICE, memory_format=torch.channels_last) for one in images]
        return list(zip(channels_last, labels.to(DEVICE), strict=True))

    @property
    def units(self) -> int:
        """Tokens or images of a step."""
        return self.batch * self.settings["context"] if self.text else self.batch


_SMALL_GPT = {"layers": 2, "width": 64, "heads": 4, "context": 64, "vocabulary": 512}
_LLAMA = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "tied": False}
_GPT2 = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50304}
_1B3 = {"layers": 24, "width": 2048, "heads": 16, "context": 2048, "vocabulary": 50304}
_3B = {"layers": 28, "width": 3072, "heads": 24, "kv_heads": 8, "inner": 8192, "context": 8192, "vocabulary": 128256}
WORKS = {
    "gpt2": Work("gpt", _GPT2, 32, 15, _SMALL_GPT),
    "gpt-1.3b": Work("gpt", _1B3, 8, 5, _SMALL_GPT),
    "llama-3b": Work("gpt", {**_3B, **_LLAMA}, 2, 5, {**_SMALL_GPT, **_LLAMA}),
    "resnet50": Work("resnet50", {}, 256, 15, {"small_input": True}),
    "simple-cnn": Work("simple-cnn", {}, 4096, 30, {}),
    "tiny": Work("gpt", {**_SMALL_GPT, "layers": 4, "width": 128}, 8, 100, _SMALL_GPT),
}


@dataclass(frozen=True)
class Variant:
    name: str
    attention: SDPBackend | None = None
    compiled: str = "whole"  # or: blocks, nothing
    mode: str | None = None  # of torch.compile
    loss_chunks: int = 1
    weights: torch.dtype = torch.float32  # bfloat16: cast once a step, not by autocast wherever they are used
    options: dict[str, Any] = field(default_factory=dict)  # of inductor
    graph: bool = False  # the whole step, optimizer and all, is one CUDA graph
    kernel: bool = False  # of our own, for the loss of a chunk, as the product has it; otherwise the compiler's
    budget: float = 1.0  # of the memory for activations that compiled code would keep: the rest it computes again
    cheap: bool = False  # compiled code computes again whatever is no product or attention
    one_pass: bool = False  # the optimizer is one kernel that reads gradients of 16 bits
    short: bool = False  # formulas for GELU, as gradus compiles blocks
    sums: bool = False  # of biases' gradients, in the kernels that write what is summed (with `short`)
    all_convolutions: bool = False  # cuDNN tries every algorithm that it has, not ten


PLAIN = Variant("as peers do it")
CUDNN = SDPBackend.CUDNN_ATTENTION
OF_ANY = (
    PLAIN,
    Variant("compiled by block", compiled="blocks"),
    Variant("max-autotune", mode="max-autotune-no-cudagraphs"),
    Variant("the whole step as one graph", graph=True),
)
_KERNEL = {"loss_chunks": 4, "kernel": True, "weights": torch.bfloat16}
_TUNED = {"coordinate_descent_tuning": True}
OF_TEXT = (
    Variant("loss in 4 chunks", loss_chunks=4),
    Variant("bf16 weights", weights=torch.bfloat16),
    Variant("kernel", **_KERNEL),
    Variant("kernel, one pass", **_KERNEL, one_pass=True),
    Variant("kernel, one pass, cheap", **_KERNEL, one_pass=True, cheap=True),
    Variant("kernel, one pass, cheap, graph", **_KERNEL, one_pass=True, cheap=True, graph=True),
    Variant("kernel, one pass, blocks", **_KERNEL, one_pass=True, compiled="blocks"),
    Variant("kernel, one pass, blocks, short", **_KERNEL, one_pass=True, compiled="blocks", short=True),
    Variant(
        "kernel, one pass, blocks, short, sums of biases",
        **_KERNEL,
        one_pass=True,
        compiled="blocks",
        short=True,
        sums=True,
    ),
    Variant(
        "kernel, one pass, blocks, short, graph", **_KERNEL, one_pass=True, compiled="blocks", short=True, graph=True
    ),
    Variant("kernel, one pass, cheap, blocks", **_KERNEL, one_pass=True, cheap=True, compiled="blocks"),
    Variant(
        "kernel, one pass, cheap, blocks, tuned",
        **_KERNEL,
        one_pass=True,
        cheap=True,
        compiled="blocks",
        options=_TUNED,
    ),
    Variant("kernel, 1 chunk", **_KERNEL | {"loss_chunks": 1}, one_pass=True, cheap=True),
    Variant("half of the activations", budget=0.5),
)
OF_IMAGES = (
    Variant("1×1 convolutions as products", options={"conv_1x1_as_mm": True}),
    Variant("1×1 convolutions as products, tuned", options={"conv_1x1_as_mm": True, "max_autotune_gemm": True}),
    Variant("reduce-overhead", mode="reduce-overhead"),
    Variant("every algorithm of cuDNN", all_convolutions=True),
    Variant("every algorithm of cuDNN, graph", all_convolutions=True, graph=True),
    Variant("bf16 weights", weights=torch.bfloat16),
    Variant("bf16 weights, cheap", weights=torch.bfloat16, cheap=True),
)
OF_TINY = (
    Variant("not compiled", compiled="nothing"),
    Variant("not compiled, one graph", compiled="nothing", graph=True),
    Variant("reduce-overhead", mode="reduce-overhead"),
)


def variants_of(name: str) -> Sequence[Variant]:
    if name == "tiny":
        return (*OF_ANY, *OF_TINY)
    return (*OF_ANY, *(OF_TEXT if WORKS[name].text else OF_IMAGES))


@dataclass(frozen=True)
class Measured:
    name: str
    seconds: float  # of a step
    spread: float
    units_per_second: float
    peak_gib: float
    first_step_seconds: float
    first_loss: float
    last_loss: float
    kernel_seconds: dict[str, float]  # of a step, by kind
    longest_kernels: dict[str, float]  # seconds of a step


class Training:
    """A model with one variant's levers pulled, and a step of it."""

    def __init__(self, work: Work, variant: Variant) -> None:
        torch.manual_seed(0)
        self.work, self.variant = work, variant
        layout = torch.preserve_format if work.text else torch.channels_last
        self.model: Any = catalogue.build(work.use, work.settings).to(DEVICE, memory_format=layout)
        self.masters = list(self.model.parameters())
        if variant.weights != torch.float32:
            self.masters = [p.detach().clone().requires_grad_() for p in self.masters]
            narrow(self.model, variant.weights)
        self.optimizer = self._optimizer(capturable=variant.graph and CUDA)
        self.samples = work.samples(8 if work.text else 2)
        torch._functorch.config.activation_memory_budget = variant.budget
        for ban in CHEAP_BANS:
            setattr(torch._functorch.config, ban, not variant.cheap)
        torch.backends.cudnn.benchmark_limit = 0 if variant.all_convolutions else 10
        self.forward = self._compiled()
        self._graphed = self._captured() if variant.graph and CUDA else None

    def _optimizer(self, capturable: bool) -> torch.optim.Optimizer:
        if self.variant.one_pass and CUDA:
            from gradus.training.one_pass_adamw import OnePassAdamW

            return OnePassAdamW(self.masters, lr=3e-4, weight_decay=0.1)
        return torch.optim.AdamW(self.masters, lr=3e-4, weight_decay=0.1, fused=True, capturable=capturable)

    def _compiled(self) -> Callable[[Tensor, Tensor], Tensor]:
        variant, on = self.variant, CUDA and self.variant.compiled != "nothing"
        if variant.loss_chunks > 1 or variant.kernel:
            chunk_loss(self.model, variant.loss_chunks, None, None, kernel=None if variant.kernel else False)
        if not on:
            return self._whole
        if variant.compiled == "blocks":
            given: dict[str, Any] = {"dynamic": False, "options": dict(variant.options) or None}
            if variant.sums:
                given["options"] = {**variant.options, "post_grad_custom_pre_pass": passes_with_sums()}
            for part in parts_to_compile(self.model):
                compile_part(part, **(with_graph_passes(**given) if variant.short else given))
            set_apart(self.model)
            return self._whole
        how: dict[str, Any] = {"mode": variant.mode} if variant.mode else {}
        how |= {"options": variant.options} if variant.options else {}
        set_apart(self.model, **how)
        self.model.compile(dynamic=False, **how)
        return self._whole

    def _whole(self, inputs: Tensor, targets: Tensor) -> Tensor:
        result = self.model(inputs, targets)
        loss: Tensor = result.loss_sum / result.count
        return loss

    def step(self, number: int) -> Tensor:
        inputs, targets = self.samples[number % len(self.samples)]
        if self._graphed is not None:
            return self._graphed(inputs, targets)
        return self._step(inputs, targets)

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        attention = sdpa_kernel(self.variant.attention) if self.variant.attention and CUDA else contextlib.nullcontext()
        with attention, torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            loss = self.forward(inputs, targets)
        loss.backward()
        self._update()
        return loss.detach()

    def _update(self) -> None:
        used = list(self.model.parameters())
        if self.variant.one_pass and CUDA:
            self._update_in_one_pass(used)
            return
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

    def _update_in_one_pass(self, used: list[nn.Parameter]) -> None:
        gradients = {m: p.grad for m, p in zip(self.masters, used, strict=True) if p.grad is not None}
        norms = torch._foreach_norm(list(gradients.values()), 2, torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(norms))
        narrow = dict(zip(self.masters, used, strict=True))
        self.optimizer.update(gradients, narrow, torch.clamp(1.0 / (norm + 1e-6), max=1.0))  # type: ignore[attr-defined]
        for parameter in used:
            parameter.grad = None

    def _captured(self) -> Callable[[Tensor, Tensor], Tensor]:
        """A step that is launched as a whole: inputs are copied to where the graph reads them."""
        inputs, targets = (tensor.clone() for tensor in self.samples[0])
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):  # whatever is made in the first steps must be there before
                self._step(inputs, targets)
        torch.cuda.current_stream().wait_stream(beside)
        if self.variant.one_pass:
            self.optimizer.expect_recording()  # type: ignore[attr-defined]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._step(inputs, targets)
        if self.variant.one_pass:
            self.optimizer.settle()  # type: ignore[attr-defined]

        def replay(new_inputs: Tensor, new_targets: Tensor) -> Tensor:
            inputs.copy_(new_inputs)
            targets.copy_(new_targets)
            graph.replay()
            return loss

        return replay


def narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """All but batch norms, whose kernels want their weights as wide as their statistics."""
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)


def measured(work: Work, variant: Variant) -> Measured:
    torch._dynamo.reset()
    if CUDA:
        torch.cuda.empty_cache()
    began = time.perf_counter()
    training = Training(work, variant)
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
    peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
    times = kernel_times(lambda: [training.step(number) for number in range(PROFILED)], PROFILED)
    return Measured(
        variant.name,
        seconds,
        (max(rounds) - min(rounds)) / seconds,
        work.units / seconds,
        peak,
        first_seconds,
        first,
        last,
        times.by_kind if times else {},
        times.longest if times else {},
    )


def ceilings(work: Work) -> list[dict[str, Any]]:
    """How fast this GPU multiplies matrices of the model's own shapes, alone."""
    tokens, width = work.units, work.settings["width"]
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
        times = list(_timed(partial(torch.matmul, a, b), 5))
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
    parser.add_argument("--only", nargs="+", help="Variants of these names, besides the first.")
    parser.add_argument("--warm", action="store_true", help="One step of each, which fills the compiler's caches.")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    work = WORKS[asked.work]
    if asked.small:
        work = replace(work, settings=work.small, batch=4, steps=2)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    wanted = [one for one in variants_of(asked.work) if asked.only is None or one.name in asked.only]
    if asked.warm:
        for variant in wanted:
            Training(work, variant).step(0)
        return
    found: list[Measured] = []
    for variant in (PLAIN, *(one for one in wanted if one != PLAIN), replace(PLAIN, name="as peers do it, again")):
        try:
            found.append(measured(work, variant))
        except Exception as error:  # one variant that a version of torch cannot do is a result too
            print(f"{variant.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        print(json.dumps(asdict(found[-1])), flush=True)
    rates = ceilings(work) if CUDA and work.text else []
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        document = {"work": asdict(work), "torch": torch.__version__, "variants": list(map(asdict, found))}
        (asked.out / f"levers-{asked.work}.json").write_text(json.dumps({**document, "ceilings": rates}, indent=1))
    for row in rates:
        print(f"{row['m']:>7} × {row['k']:>6} × {row['n']:>6}: {row['teraflops']:.0f} TFLOP/s")
    _print(found)


def _print(found: Sequence[Measured]) -> None:
    kinds = list(dict.fromkeys(kind for one in found for kind in one.kernel_seconds))
    print(f"| variant | ms | over first | tokens or images/s | GiB | first step, s | loss | {' | '.join(kinds)} |")
    print("|" + "---|" * (7 + len(kinds)))
    for one in found:
        of_kinds = " | ".join(f"{one.kernel_seconds.get(kind, 0.0) * 1e3:.1f}" for kind in kinds)
        print(
            f"| {one.name} | {one.seconds * 1e3:.2f} ±{one.spread / 2:.1%} | {found[0].seconds / one.seconds:.3f}× "
            f"| {one.units_per_second:,.0f} | {one.peak_gib:.2f} | {one.first_step_seconds:.1f} "
            f"| {one.last_loss:.4f} | {of_kinds} |"
        )


if __name__ == "__main__":
    main()
