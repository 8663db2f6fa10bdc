"""Batch normalisation over ranks is that of one process on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from batch_norm_cases import (
    STEPS,
    BatchNormAct,
    joined,
    layer,
    one_value_per_channel,
    refusal,
    results,
    shared_by_ranks,
    state,
)
from pool import Pool
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from gradus.models import catalogue
from gradus.parallel.batch_norm import SharedBatchNorm, has_batch_norm, muted_batch_norm, share_batch_norm
from gradus.parallel.replicate import replicated
from gradus.parallel.world import alone
from gradus.schema.errors import InputError

CPU = torch.device("cpu")
TOLERANCE = 1e-12


def on_one_process(dims: int, samples: int, options: dict[str, Any], bias: bool = True) -> dict[str, Any]:
    model = nn.Sequential(layer(dims, bias, **options))
    steps = [results(model, *joined(dims, samples, step)) for step in range(STEPS)]
    model.eval()
    return {"steps": steps, "state": state(model), "evaluated": results(model, *joined(dims, 4, 99))}


def close(found: Tensor, expected: Tensor) -> bool:
    return (found - expected).abs().max().item() < TOLERANCE * max(1.0, expected.abs().max().item())


def assert_joined(of_rank: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for step in range(STEPS):
        wanted = expected["steps"][step]
        for key in ("output", "input"):
            assert close(torch.cat([rank["steps"][step][key] for rank in of_rank]), wanted[key]), (step, key)
        for key in wanted.keys() - {"output", "input"}:
            assert close(sum(rank["steps"][step][key] for rank in of_rank), wanted[key]), (step, key)  # type: ignore
    for rank in of_rank:
        assert rank["state"].keys() == expected["state"].keys()
        for key, value in expected["state"].items():
            assert close(rank["state"][key], value), key
        for key, value in expected["evaluated"].items():
            assert close(rank["evaluated"][key], value), key


@pytest.mark.parametrize("sizes", [[4, 4], [5, 2], [1, 6], [3, 1, 4], [1, 1, 1]])
@pytest.mark.parametrize("dims", [2, 3, 4])
def test_outputs_gradients_and_statistics_are_those_of_the_joined_batch(
    pool: Pool, dims: int, sizes: list[int]
) -> None:
    of_rank = pool.run(len(sizes), shared_by_ranks, dims, sizes, {})
    assert_joined(of_rank, on_one_process(dims, sum(sizes), {}))


@pytest.mark.parametrize(
    "options", [{"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.5}]
)
def test_so_they_are_with_every_option(pool: Pool, options: dict[str, Any]) -> None:
    assert_joined(pool.run(2, shared_by_ranks, 4, [3, 2], options), on_one_process(4, 5, options))


def test_so_they_are_without_a_bias(pool: Pool) -> None:
    assert_joined(pool.run(2, shared_by_ranks, 4, [3, 2], {}, None, False), on_one_process(4, 5, {}, bias=False))


@pytest.mark.parametrize("muted_rank", [0, 1, 2])
def test_a_muted_rank_adds_nothing(pool: Pool, muted_rank: int) -> None:
    sizes = [3, 4]
    sizes.insert(muted_rank, 0)
    of_rank = pool.run(3, shared_by_ranks, 4, sizes, {}, muted_rank)
    silent = of_rank.pop(muted_rank)
    expected = on_one_process(4, sum(sizes), {})
    assert_joined(of_rank, expected)
    for key, value in expected["state"].items():
        assert close(silent["state"][key], value), "but it has the same statistics"
    for step in silent["steps"]:
        assert not step["input"].any()
        assert not step["0.weight.grad"].any()


@pytest.mark.parametrize("sizes", [[1, 0], [0, 1]])
def test_a_single_value_per_channel_is_refused_as_on_one_process(pool: Pool, sizes: list[int]) -> None:
    """Its variance is not defined: the running one would be not a number from then on, without a word."""
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        layer(2)(torch.ones(1, 3, dtype=torch.float64))
    for message in pool.run(2, one_value_per_channel, sizes):
        assert "Expected more than 1 value per channel" in message


def test_every_layer_of_a_model_is_replaced_and_keeps_its_parameters() -> None:
    model = catalogue.build("resnet18", {"classes": 10, "small_input": True})
    names, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
    count = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    share_batch_norm(model, CPU, some_rank_may_pad=False)
    assert sum(isinstance(module, SharedBatchNorm) for module in model.modules()) == count
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert list(model.state_dict()) == names
    assert [id(p) for p in model.parameters()] == parameters
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
@pytest.mark.parametrize(
    ("device", "some_rank_may_pad", "expected"),
    [
        ("cpu", False, SharedBatchNorm),
        ("cpu", True, SharedBatchNorm),
        ("cuda", False, nn.SyncBatchNorm),  # faster
        ("cuda", True, SharedBatchNorm),  # the other one cannot be muted
    ],
)
def test_the_kind_of_layer_follows_from_the_device_and_from_padding(
    kind: Any, device: str, some_rank_may_pad: bool, expected: type[nn.Module]
) -> None:
    norm = kind(3)
    share_batch_norm(norm, torch.device(device), some_rank_may_pad=some_rank_may_pad)
    assert type(norm) is expected


def test_a_batch_norm_with_a_forward_of_its_own_is_refused(pool: Pool) -> None:
    for message, hint in pool.run(2, refusal):
        assert "layer 1.act is a batch_norm_cases.BatchNormAct" in message
        assert "local batch" in message
        assert hint is not None
        assert "one rank" in hint


def test_one_rank_takes_it_as_it_is() -> None:
    model = nn.Sequential(BatchNormAct(3))
    assert replicated(model, alone(CPU), 25, some_rank_may_pad=False) is model
    assert type(model[0]) is BatchNormAct


def test_a_lazy_batch_norm_is_refused_until_it_has_seen_an_input() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(InputError, match=r"layer 0 is a .*LazyBatchNorm1d") as caught:
        share_batch_norm(model, CPU, some_rank_may_pad=False)
    assert "num_features" in (caught.value.hint or "")
    model(torch.randn(4, 3))
    share_batch_norm(model, CPU, some_rank_may_pad=False)
    assert type(model[0]) is SharedBatchNorm


def test_instance_norm_and_hooks_stay() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(3), nn.BatchNorm1d(3))
    model[1].register_forward_hook(lambda module, inputs, output: output + 100)
    share_batch_norm(model, CPU, some_rank_may_pad=False)
    assert type(model[0]) is nn.InstanceNorm1d
    model.eval()
    assert (model(torch.randn(4, 3, 5)) > 50).all()


class NoWaiting(TorchFunctionMode):
    """Refuses what brings a number from the host to the device, or the other way, by a copy that waits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = {"new_tensor", "tensor", "as_tensor", "item", "tolist", "cpu", "__bool__", "__float__", "__int__"}
        assert func.__name__ not in copies, f"{func.__name__} makes the host wait"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_on_a_device_the_host_does_not_wait(momentum: float | None) -> None:
    """Tensors without data stand in for a GPU: what would have to look at a value fails."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = nn.BatchNorm1d(3, momentum=momentum, device="meta")
        share_batch_norm(model, torch.device("cuda"), some_rank_may_pad=True)
        with NoWaiting(), muted_batch_norm(model, True):
            model(torch.empty(4, 3, device="meta", requires_grad=True)).sum().backward()
    finally:
        dist.destroy_process_group()


def test_models_with_batch_norm_are_told_from_those_without() -> None:
    assert has_batch_norm(catalogue.build("simple-cnn", {}))
    assert not has_batch_norm(catalogue.build("vit", {"layers": 1}))
