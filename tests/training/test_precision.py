"""Precision: what each name means, what stays in fp32, and what a device refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from gradus.models import catalogue
from gradus.models.output import LossOutput
from gradus.schema.errors import InputError
from gradus.training.precision import apply_backend_settings, numbers_for

CPU = torch.device("cpu")


@pytest.fixture
def _switches_restored() -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, deterministic
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("precision", "parameters", "autocast", "scales_loss", "tf32"),
    [
        ("fp32", torch.float32, None, False, False),
        ("bf16", torch.float32, torch.bfloat16, False, True),
        ("fp16", torch.float32, torch.float16, True, True),
        ("fp64", torch.float64, None, False, False),
    ],
)
def test_each_precision_is_what_it_says(
    precision: str, parameters: torch.dtype, autocast: torch.dtype | None, scales_loss: bool, tf32: bool
) -> None:
    numbers = numbers_for(precision, CPU)  # type: ignore[arg-type]
    assert (numbers.parameters, numbers.autocast, numbers.scales_loss, numbers.tf32) == (
        parameters,
        autocast,
        scales_loss,
        tf32,
    )
    with numbers.computing(CPU):
        product = torch.ones(2, 2, dtype=parameters) @ torch.ones(2, 2, dtype=parameters)
    assert product.dtype == (autocast or parameters)


def test_tf32_on_a_cpu_is_refused_with_the_alternative() -> None:
    with pytest.raises(InputError, match=r"plan\.precision: found tf32, which the CPU does not have") as caught:
        numbers_for("tf32", CPU)
    assert caught.value.hint == "use plan.precision=fp32"
    assert caught.value.details["allowed"] == "fp32"


def test_fp8_on_a_cpu_is_refused_with_the_reason_and_the_alternative() -> None:
    with pytest.raises(InputError, match="the CPU does not have: it has no FP8 matrix multiplication") as caught:
        numbers_for("fp8", CPU)
    assert caught.value.hint == "use plan.precision=bf16"


def test_fp8_is_bf16_but_for_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gpu = torch.device("cuda", 0)
    assert numbers_for("fp8", gpu) == numbers_for("bf16", gpu)


@pytest.mark.parametrize(
    ("precision", "capability", "alternative"),
    [
        ("bf16", (7, 5), "fp16"),
        ("tf32", (7, 0), "fp32"),
        ("bf16", (6, 1), "fp16"),
        ("fp8", (8, 6), "bf16"),
        ("fp8", (7, 0), "fp16"),
    ],
)
def test_an_older_gpu_is_refused_what_it_lacks_with_the_alternative(
    monkeypatch: pytest.MonkeyPatch, precision: str, capability: tuple[int, int], alternative: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Quadro T4")
    with pytest.raises(InputError, match="Quadro T4") as caught:
        numbers_for(precision, torch.device("cuda", 0))  # type: ignore[arg-type]
    assert caught.value.hint == f"use plan.precision={alternative}"
    assert numbers_for("fp16", torch.device("cuda", 0)).scales_loss


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norms_are_computed_in_fp32_while_matrices_are_multiplied_in_half(
    monkeypatch: pytest.MonkeyPatch, precision: str, norm: str
) -> None:
    """Whatever they are given: the residual stream of this model is fp32, that of a user's may be half."""
    model = catalogue.build("gpt", {"layers": 2, "width": 16, "heads": 2, "context": 8, "norm": norm})
    computed: list[torch.dtype] = []
    name = "layer_norm" if norm == "layernorm" else "rms_norm"
    original = getattr(nn.functional, name)

    def watched(x: Tensor, *arguments: object) -> Tensor:
        result: Tensor = original(x, *arguments)
        computed.extend((x.dtype, result.dtype, *(a.dtype for a in arguments if isinstance(a, Tensor))))
        return result

    monkeypatch.setattr(nn.functional, name, watched)
    multiplied: list[torch.dtype] = []
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda layer, inputs, output: multiplied.append(output.dtype))
    numbers = numbers_for(precision, CPU)  # type: ignore[arg-type]
    with numbers.computing(CPU):
        output = model(torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))
        model.blocks[0](torch.ones(2, 8, 16, dtype=numbers.autocast))  # type: ignore[index,operator]
    assert set(computed) == {torch.float32}
    assert set(multiplied) == {numbers.autocast}
    assert isinstance(output, LossOutput)
    assert output.loss_sum.dtype == torch.float32
    output.loss_sum.backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.usefixtures("_switches_restored")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_the_switches_of_torch_are_set_for_the_precision(precision: str, deterministic: bool) -> None:
    numbers = numbers_for(precision, CPU)  # type: ignore[arg-type]
    apply_backend_settings(numbers, deterministic)
    assert torch.backends.cuda.matmul.allow_tf32 == (precision in ("bf16", "fp16"))
    assert torch.backends.cudnn.allow_tf32 == (precision in ("bf16", "fp16"))
    assert torch.backends.cudnn.benchmark == (not deterministic)
    assert torch.backends.cudnn.deterministic == deterministic
    assert torch.are_deterministic_algorithms_enabled() == deterministic
