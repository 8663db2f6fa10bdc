"""Recomputation and offloading change what is kept for backward, and nothing else: not a bit of any gradient."""

from __future__ import annotations

import copy
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from pool import Pool
from recompute_cases import (
    GPT,
    Outcome,
    gpt,
    images,
    on_replicas,
    on_replicas_with_batch_norm,
    on_shards,
    on_tensor_slices,
    outcome,
    resnet,
    text,
    with_plan,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradus.models import catalogue
from gradus.parallel import host_memory
from gradus.parallel.recompute import KEPT, recompute_note
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan

PLANS: list[dict[str, Any]] = [
    {"recompute": "selective"},
    {"recompute": "full"},
    {"activation_offload": True},
    {"recompute": "selective", "recompute_blocks": 1},
    {"recompute": "selective", "activation_offload": True},
    {"recompute": "full", "activation_offload": True},
]
every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(map(str, plan.values())))


@pytest.fixture(autouse=True)
def _everything_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "LEAST_BYTES", 0)


def assert_identical(found: Outcome, expected: Outcome) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@every_plan
@pytest.mark.parametrize(("build", "batch"), [(gpt, text()), (resnet, images())], ids=["gpt", "resnet"])
def test_gradients_and_running_statistics_are_identical(
    plan: dict[str, Any], build: Callable[[], nn.Module], batch: tuple[Tensor, ...]
) -> None:
    """The GPT has dropout; the ResNet has batch normalisation and in-place operators."""
    model = build()
    assert_identical(outcome(with_plan(model, **plan), batch), outcome(copy.deepcopy(model), batch))


@every_plan
def test_they_are_identical_under_autocast(plan: dict[str, Any]) -> None:
    model = gpt().float()
    with torch.autocast("cpu", torch.bfloat16):
        assert_identical(outcome(with_plan(model, **plan), text()), outcome(copy.deepcopy(model), text()))


@every_plan
def test_they_are_identical_when_blocks_are_compiled(plan: dict[str, Any]) -> None:
    model = gpt()
    compiled = with_plan(model, **plan)
    torch._dynamo.reset()
    for block in compiled.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")  # type: ignore[union-attr,operator]
    assert_identical(outcome(compiled, text()), outcome(copy.deepcopy(model), text()))
    torch._dynamo.reset()


def test_a_compiled_block_with_recomputation_is_one_graph() -> None:
    model = with_plan(gpt(), recompute="selective")
    torch._dynamo.reset()
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager", fullgraph=True)  # type: ignore[union-attr,operator]
    outcome(model, text())
    torch._dynamo.reset()


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_resnet_with_compiled_blocks_updates_its_statistics_once(recompute: str) -> None:
    model = resnet()
    compiled = with_plan(model, recompute=recompute)
    torch._dynamo.reset()
    for block in compiled.stages:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")  # type: ignore[union-attr,operator]
    assert_identical(outcome(compiled, images()), outcome(copy.deepcopy(model), images()))
    torch._dynamo.reset()


@every_plan
def test_a_model_of_transformers_needs_no_change(plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=256
    )

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llama = transformers.LlamaForCausalLM(config)

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = self.llama(input_ids=tokens, labels=tokens, use_cache=False).loss
            return loss

    model = Wrapped().double()
    assert_identical(outcome(with_plan(model, **plan), text()), outcome(copy.deepcopy(model), text()))


def test_frozen_parameters_and_frozen_inputs_are_no_obstacle() -> None:
    model = gpt()
    model.requires_grad_(False)
    model.blocks[1].mlp.requires_grad_(True)  # type: ignore[index,union-attr]
    model.blocks[2].requires_grad_(True)  # type: ignore[index,union-attr]
    expected = outcome(copy.deepcopy(model), text())
    assert_identical(outcome(with_plan(model, recompute="full"), text()), expected)
    assert_identical(outcome(with_plan(model, recompute="selective"), text()), expected)


# --- across ranks


@every_plan
@pytest.mark.parametrize("way", [on_replicas, on_shards, on_tensor_slices], ids=["replicate", "shard", "tensor"])
def test_they_are_identical_on_two_ranks(pool: Pool, way: Callable[..., Outcome], plan: dict[str, Any]) -> None:
    for found, expected in zip(pool.run(2, way, plan), pool.run(2, way, {}), strict=True):
        assert_identical(found, expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_statistics_over_ranks_are_recomputed_as_they_were(pool: Pool, recompute: str, padded: bool) -> None:
    """A rank that has only padding is muted in forward; in backward it must be so again."""
    found = pool.run(2, on_replicas_with_batch_norm, {"recompute": recompute}, padded)
    for mine, expected in zip(found, pool.run(2, on_replicas_with_batch_norm, {}, padded), strict=True):
        assert_identical(mine, expected)


# --- memory


class LiveTensors(TorchDispatchMode):
    """The bytes of tensors that operators made and that somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return result

    def bytes(self) -> int:
        return sum(size for storage, size in self._storages.values() if storage() is not None)


def kept_bytes(model: nn.Module, batch: tuple[Tensor, ...]) -> int:
    """What a forward pass leaves for backward."""
    with LiveTensors() as live:
        loss = model(*batch).loss_sum
        kept = live.bytes()
    loss.backward()
    return kept


@pytest.mark.parametrize(("model", "batch"), [(gpt(layers=8), text()), (resnet(), images())], ids=["gpt", "resnet"])
def test_full_keeps_less_than_selective_and_that_less_than_none(model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    none, selective, full = (
        kept_bytes(with_plan(model, recompute=recompute), batch) for recompute in ("none", "selective", "full")
    )
    assert full < 0.7 * selective
    assert selective < 0.8 * none


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_each_block_that_is_recomputed_keeps_as_much_less(recompute: str) -> None:
    model = gpt(layers=4)
    kept = [kept_bytes(with_plan(model), text())]
    kept += [
        kept_bytes(with_plan(model, recompute=recompute, recompute_blocks=blocks), text()) for blocks in (1, 2, 3, 4)
    ]
    saved = {before - after for before, after in itertools.pairwise(kept)}
    assert len(saved) == 1, "the same for each"
    assert saved.pop() > 0
    assert kept[-1] == kept_bytes(with_plan(model, recompute=recompute), text())


def count_matmuls(model: nn.Module, batch: tuple[Tensor, ...]) -> int:
    """Of forward and backward together."""
    counted = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal counted
            counted += func in KEPT
            return func(*args, **(kwargs or {}))

    with Counting():
        model(*batch).loss_sum.backward()
    return counted


def test_selective_computes_no_matmul_and_no_attention_again() -> None:
    model = gpt()
    none, selective, full = (
        count_matmuls(with_plan(model, recompute=recompute), text()) for recompute in ("none", "selective", "full")
    )
    assert selective == none
    assert full >= none + 4 * GPT["layers"], "qkv, attention, out and up; backward does not need down's output"  # type: ignore[operator]


def test_offloaded_tensors_wait_on_the_host_and_parameters_stay() -> None:
    """On the CPU the host is the device, so what is looked at is which tensors are sent."""
    model = with_plan(gpt(), activation_offload=True)
    sent: list[Tensor] = []
    original = host_memory._Sent.__init__

    def watched(self: Any, tensor: Tensor, device: torch.device, host: Tensor) -> None:
        sent.append(tensor)
        original(self, tensor, device, host)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory._Sent, "__init__", watched)
        outcome(model, text())
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(sent) > 10 * GPT["layers"]  # type: ignore[operator]
    assert not any(tensor.untyped_storage().data_ptr() in parameters for tensor in sent)


def test_with_full_recomputation_only_the_inputs_of_blocks_are_offloaded() -> None:
    model = with_plan(gpt(), recompute="full", activation_offload=True)
    shapes: list[torch.Size] = []
    original = host_memory._Sent.__init__

    def watched(self: Any, tensor: Tensor, device: torch.device, host: Tensor) -> None:
        shapes.append(tensor.shape)
        original(self, tensor, device, host)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory._Sent, "__init__", watched)
        model(*text()).loss_sum.backward()
    assert shapes == [torch.Size([2, 12, 16])] * GPT["layers"]  # type: ignore[operator]


# --- what stays as it was


@every_plan
def test_names_signatures_and_copies_stay_as_they_are(plan: dict[str, Any]) -> None:
    model = gpt()
    changed = with_plan(model, **plan)
    assert list(changed.state_dict()) == list(model.state_dict())
    block = changed.blocks[0]  # type: ignore[index]
    assert str(inspect.signature(block.forward)) == str(inspect.signature(model.blocks[0].forward))  # type: ignore[index,union-attr]
    twin = copy.deepcopy(changed)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.zero_()
    assert_identical(outcome(twin, text()), outcome(model, text()))


def test_evaluation_pays_nothing() -> None:
    model = with_plan(gpt(), recompute="full", activation_offload=True).eval()
    plain = gpt().eval()
    with torch.no_grad():
        assert torch.equal(model(*text()).loss_sum, plain(*text()).loss_sum)


def test_a_model_without_blocks_is_treated_as_one_and_told_so() -> None:
    model = catalogue.build("mnist-cnn", {}).double()
    batch = (torch.randn(4, 1, 28, 28, dtype=torch.float64), torch.randint(0, 10, (4,)))
    assert_identical(outcome(with_plan(model, recompute="full"), batch), outcome(copy.deepcopy(model), batch))
    note = recompute_note(model, Plan(recompute="full"))
    assert note is not None
    assert "MnistCNN has no repeated blocks" in note
    assert recompute_note(gpt(), Plan(recompute="full")) == "recompute full: 3 blocks (PreNormBlock)"
    assert recompute_note(model, Plan()) is None
    two = {"recompute_blocks": 2, "recompute": "selective"}
    assert recompute_note(gpt(), Plan(**two)) == "recompute selective: the first 2 of 3 blocks (PreNormBlock)"
    assert recompute_note(gpt(), Plan(**two, activation_offload=True)) == (
        "recompute selective and activation_offload: the first 2 of 3 blocks, activation_offload of all 3 "
        "(PreNormBlock)"
    )


# --- refusals


@pytest.mark.parametrize(
    ("model", "asked", "has"),
    [
        (gpt(), 4, "GPT has 3 blocks"),
        (nn.Linear(4, 4), 2, "Linear has no repeated blocks: it is one"),
    ],
    ids=["blocks", "none"],
)
def test_more_blocks_than_there_are_are_refused_by_who_has_the_model(model: nn.Module, asked: int, has: str) -> None:
    with pytest.raises(InputError, match=f"plan.recompute_blocks: found {asked}, but {has}"):
        with_plan(model, recompute="full", recompute_blocks=asked)
    with_plan(model, recompute="full", recompute_blocks=asked - 1)


class Counting(nn.Module):
    """A block that changes a buffer in forward, as codebooks and spectral norms do."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        return y


def test_a_block_that_changes_its_buffers_is_refused() -> None:
    model = with_plan(nn.Sequential(Counting(), Counting()), recompute="full")
    with pytest.raises(InputError, match="Counting in Counting changes its buffer calls in forward"):
        model(torch.ones(2, 4))


class Counted(Counting):
    statistics = ("calls",)


def test_it_is_accepted_if_it_says_that_it_only_counts_and_counts_once() -> None:
    plain = nn.Sequential(Counted(), Counted()).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    found = outcome(with_plan(plain, recompute="full"), (x,))
    assert found["0.calls"] == 2
    assert_identical(found, outcome(copy.deepcopy(plain), (x,)))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.out = nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.relu(self.conv(x)))
        return y


def test_a_kept_result_that_is_changed_in_place_is_refused_and_full_takes_it() -> None:
    plain = nn.Sequential(InPlace(), InPlace()).double()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    with pytest.raises(InputError, match="in place") as caught:
        outcome(with_plan(plain, recompute="selective"), (x,))
    assert caught.value.hint is not None
    assert "plan.recompute=full" in caught.value.hint
    assert_identical(outcome(with_plan(plain, recompute="full"), (x,)), outcome(copy.deepcopy(plain), (x,)))
