"""What holds for every reference model: calling convention, deferred initialisation, learning, counted work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gradus.models import catalogue
from gradus.models.output import LossOutput
from gradus.parallel.materialise import materialise

TINY_LLAMA = {
    "layers": 2,
    "width": 32,
    "kv_heads": 2,
    "context": 16,
    "vocabulary": 31,
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "tied": False,
}
TINY: dict[str, tuple[str, dict[str, object], tuple[int, ...]]] = {
    "simple-cnn": ("simple-cnn", {}, (3, 32, 32)),
    "mnist-cnn": ("mnist-cnn", {}, (1, 28, 28)),
    "resnet18": ("resnet", {"classes": 10, "small_input": True}, (3, 32, 32)),
    "resnet50": ("resnet50", {"classes": 10, "image": 64}, (3, 64, 64)),
    "vit": ("vit", {"layers": 2, "width": 32, "heads": 2, "patch": 8}, (3, 32, 32)),
    "gpt": ("gpt", {"layers": 2, "width": 32, "context": 16, "vocabulary": 31}, (16,)),
    "llama": ("gpt", TINY_LLAMA, (16,)),
    "bert": ("bert", {"layers": 2, "width": 32, "context": 16, "vocabulary": 31, "position_offset": 2}, (16,)),
}
EVERY_MODEL = pytest.mark.parametrize("name", TINY)


def tiny(name: str) -> nn.Module:
    use, options, _ = TINY[name]
    return catalogue.build(use, options)


def example(name: str, count: int = 4) -> tuple[Tensor, Tensor]:
    shape = TINY[name][2]
    generator = torch.Generator().manual_seed(1)
    if len(shape) == 1:
        tokens = torch.randint(0, 31, (count, *shape), generator=generator)
        return tokens, tokens.roll(-1, dims=1)
    return torch.randn(count, *shape, generator=generator), torch.arange(count) % 10


@EVERY_MODEL
def test_logits_without_targets_and_sums_with_them(name: str) -> None:
    model = tiny(name).eval()
    inputs, targets = example(name)
    logits = model(inputs)
    assert logits.shape[:-1] == targets.shape
    output = model(inputs, targets)
    assert isinstance(output, LossOutput)
    assert output.count == targets.numel()
    assert output.correct == (logits.argmax(-1) == targets).sum()
    assert model.train()(inputs, targets).correct is None


@EVERY_MODEL
def test_nothing_is_allocated_on_meta_and_later_weights_are_the_same(name: str) -> None:
    torch.manual_seed(7)
    direct = tiny(name)
    random_state = torch.get_rng_state()
    with torch.device("meta"):
        deferred = tiny(name)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(tensor.is_meta for tensor in (*deferred.parameters(), *deferred.buffers()))
    materialise(deferred, torch.device("cpu"))
    for tensor in (*deferred.parameters(), *deferred.buffers()):
        tensor.data.fill_(77)  # what is not initialised shows
    torch.manual_seed(7)
    deferred.init_weights()

    expected = dict((*direct.named_parameters(), *direct.named_buffers()))
    found = dict((*deferred.named_parameters(), *deferred.named_buffers()))
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert torch.equal(value, found[key]), key
        assert not (value == 77).any(), key


@EVERY_MODEL
def test_a_planner_can_build_and_run_it_without_memory(name: str) -> None:
    with FakeTensorMode():
        model = tiny(name)
        shape = TINY[name][2]
        inputs = torch.zeros(2, *shape) if len(shape) > 1 else torch.zeros(2, *shape, dtype=torch.long)
        targets = torch.zeros(2, *(shape if len(shape) == 1 else ()), dtype=torch.long)
        model(inputs, targets).loss_sum.backward()
    assert all(isinstance(parameter.grad, FakeTensor) for parameter in model.parameters())


@EVERY_MODEL
def test_a_few_steps_reduce_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = tiny(name)
    inputs, targets = example(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if inputs.is_floating_point() else 1e-2)
    losses = []
    for _ in range(6):
        output = model(inputs, targets)
        loss = output.loss_sum / output.count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[-1] < 0.9 * losses[0], losses


@EVERY_MODEL
def test_closed_formulas_for_work_agree_with_a_count(name: str) -> None:
    model = tiny(name).eval()
    # Written out as matrix multiplications, since the counter does not know attention's fused form on a CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(example(name, count=1)[0])
    expected = 3 * counter.get_total_flops()
    if catalogue.resolve(*TINY[name][:2])[0].name == "gpt":
        settings = model.settings
        expected -= 3 * settings.layers * 2 * settings.context**2 * settings.width  # the counter ignores causality
    assert model.flops_per_sample() == expected


def test_work_of_resnet50_is_the_published_4_gigamacs() -> None:
    with torch.device("meta"):
        model = catalogue.build("resnet50", {})
    assert model.flops_per_sample() / 6 == pytest.approx(4.09e9, rel=1e-3)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "vit"])
def test_double_precision_is_kept_from_end_to_end(name: str) -> None:
    model = tiny(name).double()
    inputs, targets = example(name)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    dtypes = set()
    for layer in model.modules():
        layer.register_forward_hook(lambda _, __, y: dtypes.add(y.dtype) if isinstance(y, Tensor) else None)
    assert model(inputs, targets).loss_sum.dtype == torch.float64
    assert dtypes == {torch.float64}


def test_zero_init_residual_starts_each_block_as_its_shortcut() -> None:
    model = catalogue.build("resnet18", {"zero_init_residual": True, "small_input": True}).eval()
    block = model.stages[0][1]
    x = torch.rand(2, 64, 8, 8)
    assert torch.equal(block(x), x)


def test_dropout_only_acts_in_training() -> None:
    model = catalogue.build("gpt", {"layers": 1, "width": 32, "dropout": 0.5})
    tokens = torch.arange(8)[None]
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
