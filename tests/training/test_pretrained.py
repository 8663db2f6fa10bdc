"""Pretrained weights: every tensor in its place and type, or an error that says what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import weight_cases
from pool import Pool
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gradus.checkpoint.store import CheckpointStore
from gradus.models.gpt import GPT
from gradus.models.settings import GPTSettings
from gradus.schema.errors import InputError
from gradus.training.pretrained import load_pretrained

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
        self.head = nn.Linear(5, classes)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def file_of(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path)
    return path


def refusal(model: nn.Module, path: Path, **options: Any) -> InputError:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError) as caught:
        load_pretrained(model, path, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "nothing was changed"
    return caught.value


def test_weights_and_saved_buffers_come_back(tmp_path: Path) -> None:
    source, model = Net(), Net()
    nn.init.normal_(source.body[1].running_mean)  # type: ignore[arg-type]
    load_pretrained(model, file_of(tmp_path, source.state_dict()))
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_numbers_are_converted_to_the_type_of_the_parameter(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradus.checkpoint.reading.CHUNK_BYTES", 48)  # several pieces, the last one short
    source = nn.Linear(6, 11).to(stored)
    model = nn.Linear(6, 11).to(wanted)
    load_pretrained(model, file_of(tmp_path, source.state_dict()))
    assert model.weight.dtype == wanted
    assert torch.equal(model.weight, source.weight.to(wanted))
    assert torch.equal(model.bias, source.bias.to(wanted))


def test_a_parameter_keeps_its_memory_layout(tmp_path: Path) -> None:
    source, model = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    memory = model.weight.data_ptr()
    load_pretrained(model, file_of(tmp_path, source.state_dict()))
    assert torch.equal(model.weight, source.weight)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.weight.data_ptr() == memory, "in place"


def test_missing_and_unexpected_names_are_listed(tmp_path: Path) -> None:
    tensors = dict(Net().state_dict())
    tensors["extra.weight"] = tensors.pop("head.bias")
    error = refusal(Net(), file_of(tmp_path, tensors))
    assert "missing (1): head.bias; unexpected (1): extra.weight" in error.message
    assert error.details["missing"] == ["head.bias"]
    assert error.details["unexpected"] == ["extra.weight"]
    assert error.hint is not None
    assert 'model.weights_skip: ["head.bias", "extra.*"]' in error.hint


def test_a_file_of_another_model_says_so(tmp_path: Path) -> None:
    error = refusal(Net(), file_of(tmp_path, nn.Sequential(nn.Linear(6, 5)).state_dict()))
    assert "no name of the file is one of the model's" in str(error.hint)
    assert "model.use" in str(error.hint)


def test_a_shape_that_differs_is_an_error_with_both(tmp_path: Path) -> None:
    error = refusal(Net(classes=4), file_of(tmp_path, Net().state_dict()))
    assert "head.weight is (3, 5) there and (4, 5) here; head.bias is (3,) there and (4,) here" in error.message


def test_whole_numbers_do_not_become_weights(tmp_path: Path) -> None:
    tensors = {**Net().state_dict(), "head.weight": torch.ones(3, 5, dtype=torch.int8)}
    assert "head.weight is I8 there and torch.float32 here" in refusal(Net(), file_of(tmp_path, tensors)).message


def test_a_new_head_is_skipped_whatever_the_file_has_there(tmp_path: Path) -> None:
    source, model = Net(), Net(classes=4)
    tensors = {**source.state_dict(), "old_head.weight": torch.zeros(2)}
    before = model.head.weight.clone()
    load_pretrained(model, file_of(tmp_path, tensors), skip=["head.*", "old_head.*"])
    assert torch.equal(model.head.weight, before)
    assert torch.equal(model.body[0].weight, source.body[0].weight)  # type: ignore[arg-type]


def test_a_skip_that_matches_nothing_suggests_the_nearest(tmp_path: Path) -> None:
    error = refusal(Net(), file_of(tmp_path, Net().state_dict()), skip=["haed.weight"])
    assert error.details["field"] == "model.weights_skip"
    assert error.details["nearest"] == "head.weight"


SMALL = {"layers": 2, "width": 16, "heads": 2, "context": 8, "vocabulary": 11}


def small_gpt(**settings: Any) -> GPT:
    return GPT(GPTSettings(**{**SMALL, **settings}))


def test_a_tied_weight_goes_by_either_name_and_counts_once(tmp_path: Path) -> None:
    source = small_gpt()
    first = dict(source.named_parameters())
    second = {**first, "head.output.weight": first["embedding.token.weight"]}
    only_second = {name: p for name, p in second.items() if name != "embedding.token.weight"}
    for tensors in (first, second, only_second):
        model = small_gpt()
        load_pretrained(model, file_of(tmp_path, tensors))
        assert torch.equal(model.head.output.weight, source.embedding.token.weight)
        assert model.head.output.weight is model.embedding.token.weight


def test_two_names_of_a_tied_weight_must_agree(tmp_path: Path) -> None:
    tensors = {**small_gpt(tied=False).state_dict()}
    error = refusal(small_gpt(), file_of(tmp_path, tensors))
    assert "head.output.weight and embedding.token.weight differ" in error.message
    assert error.hint == "--set model.tied=false"
    model = small_gpt(tied=False)
    tied = dict(small_gpt().named_parameters())
    assert "model.tied=true" in str(refusal(model, file_of(tmp_path, tied)).hint)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_sharded_model_gets_its_own_rows(pool: Pool, tmp_path: Path, ranks: int) -> None:
    tensors = {"matrix": torch.randn(weight_cases.ODD), "vector": torch.randn(3)}
    file = file_of(tmp_path, {name: t.to(torch.float64 if name == "vector" else None) for name, t in tensors.items()})
    for found in pool.run(ranks, weight_cases.sharded, str(file), None):
        assert torch.equal(found["matrix"], tensors["matrix"])
        assert torch.equal(found["vector"], tensors["vector"])


@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (1, -1), (-1, 0), (1, 1)])
def test_a_matrix_cut_along_any_dimension_of_a_mesh(pool: Pool, tmp_path: Path, dims: tuple[int, int]) -> None:
    tensors = {"matrix": torch.randn(weight_cases.ODD), "vector": torch.randn(3)}
    for found in pool.run(4, weight_cases.sharded_along, str(file_of(tmp_path, tensors)), dims):
        assert torch.equal(found, tensors["matrix"])


def test_transposed_and_joined_matrices_are_cut_up_too(pool: Pool, tmp_path: Path) -> None:
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=11, n_positions=8, n_embd=12, n_layer=2, n_head=2, tie_word_embeddings=False)
    )
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=12,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
        )
    )
    as_gpt2 = GPTSettings(**{**SMALL, "width": 12, "activation": "gelu-tanh", "tied": False})
    as_llama = GPTSettings(
        **{**SMALL, "width": 12, "heads": 6, "kv_heads": 2, "positions": "rotary", "norm": "rmsnorm", "inner": 20},
        activation="swiglu",
        bias=False,
        tied=False,
    )
    for number, (foreign, settings) in enumerate([(gpt2, as_gpt2), (llama, as_llama)]):
        folder = tmp_path / str(number)
        foreign.save_pretrained(folder)
        whole = GPT(settings)
        load_pretrained(whole, folder)
        for found in pool.run(3, weight_cases.sharded, str(folder), settings):
            for name, parameter in whole.named_parameters():
                assert torch.equal(found[name], parameter), name


def test_a_checkpoint_and_a_run_are_weights_as_well(tmp_path: Path) -> None:
    source = Net()
    (tmp_path / "run" / "attempts").mkdir(parents=True)
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step, value in ((1, 0.5), (2, 0.25)):
        with torch.no_grad():
            source.scale.fill_(value)
        tensors = {f"model.{name}": t.clone() for name, t in source.state_dict().items()}
        store.save(step, {**tensors, "optimizer.scale.step": torch.tensor(1.0)}, {})
    for path, expected in ((store.path(1), 0.5), (tmp_path / "run", 0.25)):
        model = Net()
        load_pretrained(model, path)
        assert model.scale.item() == expected
        assert torch.equal(model.head.weight, source.head.weight)


def test_a_damaged_checkpoint_is_no_weights(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(1, {f"model.{name}": t.clone() for name, t in Net().state_dict().items()}, {}).path
    [part] = path.glob("part-*.safetensors")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert f"{part.name}: found " in refusal(Net(), path).message
