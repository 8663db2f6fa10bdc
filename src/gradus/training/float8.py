"""precision fp8: the large Linear layers multiply in 8 bits, all else is as in bf16.

These Linear layers stay in bf16, because an error there goes straight into the input or the output of the model, or
because the kernels cannot take them:

- the first and the last layer with a weight (Linear, convolution, embedding), in the order in which the model has them;
- one whose weight is somebody else's too, as of an output projection that is tied to the embedding;
- one with a forward of its own (LoRA), or whose sizes are no multiples of 16 (128 for blocks), or a narrow one.

Layers stay the same objects with the same parameters, in fp32 or, where they are sharded, gathered in bf16. So a
checkpoint does not know about fp8.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gradus.record.format import first_line
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan, Scaling
from gradus.training.float8_matmul import E4M3, Float8Product, multiple_needed, product, rectangle_of, scaled

# An estimate: what is saved grows with tokens × inputs × outputs, what scaling costs with the sizes of the three
# matrices. On an H200 (709 TFLOP/s in bf16, 1,112 in e4m3, about 12 bytes moved for each value) the two meet where
# 1 / (1/tokens + 1/inputs + 1/outputs) is about 1,000: with many tokens, at 2,048 × 2,048. The kernels for one scale
# (float8_kernel.py) move half as many bytes; from where on it pays with them was not measured.
BREAK_EVEN = 1000
LEAST_WIDTH = 256  # narrower layers (routers, small heads) are never worth it
NAMES_SHOWN = 5


class Float8Linear(nn.Linear):
    """A Linear layer whose products are in 8 bits. Made of a Linear layer by changing its class."""

    scaling: Scaling

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.bfloat16
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        missing = -rows.shape[0] % multiple_needed(self.scaling)
        if missing:  # zeros add nothing to any sum over rows
            rows = nn.functional.pad(rows, (0, 0, 0, missing))
        y: Tensor = Float8Product.apply(rows, self.weight, self.bias, self.scaling)  # type: ignore[no-untyped-call]
        if missing:
            y = y[:-missing]
        return y.reshape(*x.shape[:-1], self.out_features)


@dataclass(frozen=True)
class Float8Layers:
    """Which layers of a model multiply in 8 bits, and why others do not."""

    scaling: Scaling
    chosen: dict[str, tuple[int, int]] = field(default_factory=dict)  # name, and its inputs and outputs
    left: dict[str, str] = field(default_factory=dict)  # name and reason

    def summary(self) -> str:
        """How many layers multiply in 8 bits, and which do not, for what reason."""
        total = len(self.chosen) + len(self.left)
        said = [f"fp8 ({self.scaling} scaling): {len(self.chosen)} of {total} Linear layers"]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            shown = ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
            said.append(f"in bf16, {reason}: {shown} ({len(names)})")
        return "; ".join(said)

    def doubts(self, tokens: int | None, compiled: bool) -> list[str]:
        """Why fp8 is likely to be no faster than bf16, with the numbers; nothing where it should be.

        `tokens` is the number of rows that a layer sees at once on one rank, where that is known.
        """
        doubts = []
        sizes = list(self.chosen.values())
        multiplied = sum(inputs * outputs for inputs, outputs in sizes)
        moved = sum(inputs + outputs + (inputs * outputs / tokens if tokens else 0) for inputs, outputs in sizes)
        if sizes and multiplied < BREAK_EVEN * moved:
            examples = ", ".join(f"{inputs} × {outputs}" for inputs, outputs in list(dict.fromkeys(sizes))[:3])
            rows = f" with {tokens:,} tokens at a time" if tokens else ""
            doubts.append(
                f"fp8 is likely to be slower than bf16: products of {examples}{rows} are small, and to scale their "
                f"operands takes longer than 8 bits save. By an estimate it pays where 1 / (1/tokens + 1/inputs + "
                f"1/outputs) is above {BREAK_EVEN:,}; here it is {multiplied / moved:,.0f}"
            )
        if not compiled and self.scaling != "tensor":  # which has kernels of its own
            doubts.append(
                "fp8 without plan.compile is likely to be slower than bf16: each scaling is several passes over memory"
            )
        return doubts


def choose_layers(model: nn.Module, scaling: Scaling) -> Float8Layers:
    """The Linear layers that can multiply in 8 bits without harm."""
    layers = Float8Layers(scaling)
    weighted = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding, _ConvNd))]
    holders = Counter(id(module.weight) for module in weighted)
    multiple = multiple_needed(scaling)
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        sizes = (layer.in_features, layer.out_features)
        if holders[id(layer.weight)] > 1:
            layers.left[name] = "tied to another layer"
        elif layer is weighted[0]:
            layers.left[name] = "the first layer"
        elif layer is weighted[-1]:
            layers.left[name] = "the last layer"
        elif type(layer) is not nn.Linear and not isinstance(layer, Float8Linear):
            layers.left[name] = f"a {type(layer).__name__}"
        elif sizes[0] % multiple or sizes[1] % multiple:
            layers.left[name] = f"sizes no multiples of {multiple}"
        elif min(sizes) < LEAST_WIDTH:
            layers.left[name] = f"narrower than {LEAST_WIDTH}"
        else:
            layers.chosen[name] = sizes
    return layers


def apply_float8(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """With precision fp8, let the model's large Linear layers multiply in 8 bits, in place. Before compilation."""
    if plan.precision != "fp8":
        return
    check_float8(plan.fp8_scaling, device)
    use_float8(model, plan.fp8_scaling)


def use_float8(model: nn.Module, scaling: Scaling) -> None:
    """The same, whatever the device can do."""
    layers = choose_layers(model, scaling)
    if not layers.chosen:
        raise InputError(
            f"plan.precision: found fp8, but no layer of the model can use it: {layers.summary()}",
            hint="use plan.precision=bf16",
            field="plan.precision",
            found="fp8",
            allowed="bf16",
        )
    for name in layers.chosen:
        layer = model.get_submodule(name)
        layer.__class__ = Float8Linear
        layer.scaling = scaling  # type: ignore[assignment]


def check_float8(scaling: Scaling, device: torch.device) -> None:
    """Refuse a kind of scaling that this device, or this build of torch, cannot multiply with.

    A small product is done and compared with what it should be: which scales a kernel takes, and in what order they
    have to be in memory, differs between generations.
    """
    reason = _lacking(scaling, device)
    if reason:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        raise InputError(
            f"plan.fp8_scaling: found {scaling}, which torch {torch.__version__} cannot multiply with on {name}: "
            f"{reason}",
            hint="use plan.fp8_scaling=tensor, or plan.precision=bf16",
            field="plan.fp8_scaling",
            found=scaling,
            allowed="tensor",
        )


def _lacking(scaling: Scaling, device: torch.device) -> str | None:
    if scaling == "mx" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (10, 0):
        has = torch.cuda.get_device_capability(device)
        return f"MXFP8 needs compute capability 10.0 or newer, and this is {has[0]}.{has[1]}"
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 512, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    a8, b8 = (
        scaled(matrix, rectangle_of(scaling, matrix, is_weight=weight), E4M3, powers_of_two=scaling == "mx")
        for matrix, weight in ((a, False), (b, True))
    )
    try:
        found = product(a8, b8, scaling, torch.bfloat16).float()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return first_line(error)
    expected = a8.whole() @ b8.whole().T
    return None if torch.allclose(found, expected, rtol=0.02, atol=0.5) else "its result is wrong"
