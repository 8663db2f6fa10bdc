"""Batch normalisation over ranks is that of one process on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batch_norm_cases import STEPS, joined, layer, one_value_per_channel, results, shared_by_ranks, state
from pool import Pool
from torch import Tensor, nn

from gradus.models import catalogue
from gradus.parallel.batch_norm import SharedBatchNorm, has_batch_norm, share_batch_norm

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
    shared = share_batch_norm(model, CPU)
    assert sum(isinstance(module, SharedBatchNorm) for module in shared.modules()) == count
    assert not any(isinstance(module, nn.BatchNorm2d) for module in shared.modules())
    assert list(shared.state_dict()) == names
    assert [id(p) for p in shared.parameters()] == parameters
    assert not any(tensor.is_meta for tensor in shared.state_dict().values())


def test_a_model_that_is_itself_a_batch_norm_is_replaced() -> None:
    assert isinstance(share_batch_norm(nn.BatchNorm1d(3), CPU), SharedBatchNorm)


def test_a_layer_that_is_used_twice_stays_one_layer() -> None:
    norm = nn.BatchNorm1d(3)
    shared = share_batch_norm(nn.ModuleDict({"here": norm, "there": nn.Sequential(norm)}), CPU)
    assert isinstance(shared.here, SharedBatchNorm)
    assert shared.there[0] is shared.here  # type: ignore[index]


def test_models_with_batch_norm_are_told_from_those_without() -> None:
    assert has_batch_norm(catalogue.build("simple-cnn", {}))
    assert not has_batch_norm(catalogue.build("vit", {"layers": 1}))
