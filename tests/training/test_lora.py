"""LoRA: starts as the base, trains little, saves only that, and merges into what it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from training_cases import recipe_for, run_on

from gradus.checkpoint.base import base_of, bits_summed, mark_base
from gradus.checkpoint.state import collect, restore_model, restore_optimizer
from gradus.checkpoint.store import CheckpointStore
from gradus.models import catalogue
from gradus.models.gpt import GPT
from gradus.models.settings import GPTSettings
from gradus.record.directory import RunDirectory
from gradus.schema.errors import InputError
from gradus.schema.recipe import LoraBlock, OptimizerBlock, Recipe
from gradus.training.building import build_model
from gradus.training.exporting import export, merged_tensors, open_saved
from gradus.training.lora import LoraLinear, adapted_layers, with_lora
from gradus.training.optimizers import build_optimizer

CPU = torch.device("cpu")
SMALL = {"layers": 2, "width": 16, "heads": 2, "context": 8, "vocabulary": 11}
TOKENS = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(0))


def small_gpt(**settings: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTSettings(**{**SMALL, **settings}))


def block(**changes: Any) -> LoraBlock:
    return LoraBlock(**{"rank": 4, "alpha": 8.0, **changes})


def trained_a_little(model: nn.Module, steps: int = 3) -> torch.optim.Optimizer:
    optimizer = build_optimizer(model, OptimizerBlock(use="adamw", lr=0.05))
    for _ in range(steps):
        model(TOKENS, TOKENS).loss_sum.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(TOKENS)
    model.train()
    return found


def test_it_starts_as_the_very_model_it_is_given() -> None:
    model = small_gpt()
    before = logits(model)
    names = {name for name, _ in model.named_parameters()}
    with_lora(model, block(), seed=1)
    assert torch.equal(logits(model), before)
    assert names < {name for name, _ in model.named_parameters()}, "what was there keeps its name"
    assert all(layer.lora_a.abs().sum() > 0 for layer in adapted_layers(model).values())


def test_only_the_small_matrices_are_trained_and_only_they_change() -> None:
    model = with_lora(small_gpt(), block(targets=["*.attention.*"]), seed=1)
    assert set(adapted_layers(model)) == {f"blocks.{i}.attention.{part}" for i in (0, 1) for part in ("qkv", "out")}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = trained_a_little(model)
    for name, parameter in model.named_parameters():
        is_adapter = name.endswith(("lora_a", "lora_b"))
        assert parameter.requires_grad == is_adapter, name
        assert (parameter in optimizer.state) == is_adapter, name
        assert torch.equal(parameter, before[name]) != is_adapter, name


def test_merged_weights_do_what_base_and_adapters_do_together() -> None:
    model = with_lora(small_gpt(), block(), seed=1)
    start = logits(model)
    trained_a_little(model)
    plain = small_gpt()
    plain.load_state_dict(merged_tensors(model) | {"head.output.weight": plain.head.output.weight})
    assert not torch.allclose(logits(model), start, atol=1e-2), "it was trained"
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)


def test_alpha_over_rank_scales_the_update() -> None:
    updates = []
    for alpha in (None, 4.0, 8.0):
        model = with_lora(nn.Sequential(nn.Linear(6, 5)), block(alpha=alpha), seed=1)
        layer = model[0]  # type: ignore[index]
        nn.init.ones_(layer.lora_b)  # type: ignore[union-attr,arg-type]
        updates.append(layer.merged() - layer.weight)  # type: ignore[union-attr,operator]
    torch.testing.assert_close(updates[0], updates[1])  # without alpha the scale is 1
    torch.testing.assert_close(updates[2], 2 * updates[1])


def test_the_start_depends_on_the_seed_and_the_name_alone() -> None:
    def start(seed: int, targets: list[str]) -> Tensor:
        torch.manual_seed(torch.seed())  # whatever was drawn before
        model = with_lora(small_gpt(), block(targets=targets), seed)
        return adapted_layers(model)["blocks.1.mlp.up"].lora_a.detach()

    assert torch.equal(start(1, ["*"]), start(1, ["blocks.1.mlp.up"]))
    assert not torch.equal(start(1, ["*"]), start(2, ["*"]))
    layers = adapted_layers(with_lora(small_gpt(), block(), seed=1))
    assert not torch.equal(layers["blocks.0.mlp.up"].lora_a, layers["blocks.1.mlp.up"].lora_a)


GPT2 = {"use": "gpt2-124m", "context": 8}
GPT2_TOKENS = torch.randint(0, 50_304, (1, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def gpt2() -> tuple[Recipe, nn.Module, torch.optim.Optimizer]:
    """All 124 million parameters, with adapters that have been trained for two steps."""
    lora = {"rank": 8, "alpha": 16, "targets": ["*.attention.*", "*.mlp.*"]}
    recipe = recipe_for("gpt", model=GPT2, lora=lora)
    model = build_model(recipe, CPU, torch.float32)
    optimizer = build_optimizer(model, recipe.optimizer)
    for _ in range(2):
        model(GPT2_TOKENS, GPT2_TOKENS).loss_sum.backward()
        optimizer.step()
        optimizer.zero_grad()
    return recipe, model, optimizer


def test_the_optimizer_of_gpt2_is_as_small_as_the_formula_says(gpt2: Any) -> None:
    _, model, optimizer = gpt2
    rank, width, layers = 8, 768, 12
    inputs_and_outputs = (width + 3 * width) + (width + width) + 2 * (width + 4 * width)  # qkv, out, up and down
    numbers = layers * rank * inputs_and_outputs
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == numbers
    counters = 4 * len(trained)  # how often each was updated, as one float
    found = sum(t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values())
    assert found == 2 * 4 * numbers + counters  # AdamW keeps two fp32 numbers for each
    assert numbers < sum(p.numel() for p in model.parameters()) / 90


@pytest.mark.slow
def test_gpt2_exported_merged_gives_the_logits_of_base_and_adapters(tmp_path: Path, gpt2: Any) -> None:
    """The whole way: recipe, training, checkpoint of the adapters, export, and `safetensors` alone to read it."""
    recipe, model, optimizer = gpt2
    run = saved_run(tmp_path, recipe, model, optimizer)
    size = (run.checkpoints / "step-00000003" / "part-00000-of-00001.safetensors").stat().st_size
    assert size < 3 * 4 * sum(p.numel() for p in model.parameters() if p.requires_grad) + 100_000, "adapters only"
    export(open_saved(run.path), tmp_path / "out")
    plain = catalogue.build("gpt2-124m", {"context": 8})
    with torch.no_grad():
        base = plain.eval()(GPT2_TOKENS)
        missing, unexpected = plain.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=False)
        assert (missing, unexpected) == (["head.output.weight"], [])  # which is the embedding
        merged = plain(GPT2_TOKENS)
        torch.testing.assert_close(merged, model.eval()(GPT2_TOKENS), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(merged, base, atol=1e-2)


def test_adapters_alone_are_exported_with_their_settings(tmp_path: Path) -> None:
    recipe = recipe_for("gpt", model={"use": "gpt", **SMALL}, lora={"rank": 2, "targets": ["*.qkv"]})
    model = build_model(recipe, CPU, torch.float32)
    run = saved_run(tmp_path, recipe, model, trained_a_little(model))
    files = export(open_saved(run.path), tmp_path / "adapter", adapter=True)
    adapter = load_file(files[0])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert adapter.keys() == trained.keys()
    assert all(torch.equal(adapter[name], p) for name, p in trained.items())
    assert json.loads(files[1].read_text())["rank"] == 2


def saved_run(folder: Path, recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer) -> RunDirectory:
    run = RunDirectory.create(folder / "runs", recipe.name)
    (run.attempt_path(run.new_attempt()) / "recipe.yaml").write_text(recipe.to_yaml())
    tensors, numbers = collect(model, optimizer)
    CheckpointStore(run.checkpoints).save(3, tensors, {"optimizer": numbers})
    return run


class Wrapped(nn.Module):
    """A user's model with torch's own attention, which takes weights out of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.statistics = nn.BatchNorm1d(8)
        self.output = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.output(self.statistics(self.encoder(self.embedding(tokens))))
        return logits


@pytest.fixture
def _fast_path() -> Any:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(True)
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


@pytest.mark.usefixtures("_fast_path")
def test_updates_count_in_evaluation_of_torchs_own_transformer_too() -> None:
    model = with_lora(Wrapped(), block(), seed=1)
    assert {"encoder.linear1", "encoder.linear2", "output"} == set(adapted_layers(model))
    before = logits(model)
    nn.init.normal_(model.get_submodule("encoder.linear1").lora_b)  # type: ignore[arg-type]
    assert not torch.allclose(logits(model), before)


def test_a_shared_layer_stays_shared_and_a_bare_layer_will_do() -> None:
    shared = nn.Linear(4, 4)
    model = with_lora(nn.Sequential(shared, nn.ReLU(), shared), block(), seed=1)
    assert model[0] is model[2]  # type: ignore[index]
    assert isinstance(with_lora(nn.Linear(3, 2), block(), seed=1), LoraLinear)


def test_a_tied_output_is_left_out_and_refused_if_it_is_all_that_is_asked_for() -> None:
    assert "head.output" not in adapted_layers(with_lora(small_gpt(), block(), seed=1))
    assert "head.output" in adapted_layers(with_lora(small_gpt(tied=False), block(), seed=1))
    with pytest.raises(InputError, match=r"head\.output is another layer's too") as caught:
        with_lora(small_gpt(), block(targets=["head.output"]), seed=1)
    assert "blocks.0.mlp.up" in caught.value.details["allowed"]


def test_targets_that_match_nothing_suggest_the_nearest() -> None:
    with pytest.raises(InputError, match=r"did you mean 'blocks.0.mlp.up'") as caught:
        with_lora(small_gpt(), block(targets=["blocks.0.mpl.up"]), seed=1)
    assert caught.value.details["field"] == "lora.targets"
    with pytest.raises(InputError, match="no Linear layer"):
        with_lora(nn.Conv1d(2, 2, 1), block(), seed=1)


def test_it_trains_under_bf16() -> None:
    model = with_lora(small_gpt(), block(), seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(TOKENS, TOKENS).loss_sum.backward()
    for layer in adapted_layers(model).values():
        assert layer.lora_b.grad is not None
        assert layer.lora_b.grad.dtype == torch.float32
        assert layer.lora_b.grad.abs().sum() > 0


def lora_model(weights: Path | None = None, **changes: Any) -> nn.Module:
    options = {"use": "gpt", **SMALL} | ({"weights": str(weights)} if weights else {})
    recipe = recipe_for("gpt", model=options, lora={"rank": 2, "targets": ["*.qkv"]}, **changes)
    return build_model(recipe, CPU, torch.float32)


def test_a_checkpoint_holds_the_adapters_and_goes_on_bit_for_bit() -> None:
    model = lora_model()
    optimizer = trained_a_little(model)
    tensors, numbers = collect(model, optimizer)
    of_model = {name for name in tensors if name.startswith("model.")}
    assert of_model == {f"model.blocks.{i}.attention.qkv.lora_{part}" for i in (0, 1) for part in "ab"}
    saved = {name: t.detach().clone() for name, t in tensors.items()}
    other = lora_model()
    other_optimizer = build_optimizer(other, OptimizerBlock(use="adamw", lr=0.05))
    restore_model(other, saved)
    restore_optimizer(other, other_optimizer, saved, numbers, groups=False)
    assert torch.equal(logits(other), logits(model))


def test_adapters_are_not_put_beside_another_base(tmp_path: Path) -> None:
    weights = tmp_path / "base.safetensors"
    base = {name: p.detach() for name, p in small_gpt().named_parameters()}
    save_file(base, weights)
    tensors, _ = collect(model := lora_model(weights), trained_a_little(model))
    restore_model(lora_model(weights), tensors)
    changed = base["blocks.1.mlp.down.weight"].clone()
    changed[3, 5] += 1e-6
    save_file({**base, "blocks.1.mlp.down.weight": changed}, weights)
    other = lora_model(weights)
    with pytest.raises(InputError, match="trained beside other weights") as caught:
        restore_model(other, tensors)
    assert caught.value.details["field"] == "model.weights"
    with pytest.raises(InputError, match="trained beside other weights"):
        restore_model(lora_model(seed=8), tensors)


def test_whole_models_and_adapters_are_not_mixed_up() -> None:
    plain = small_gpt()
    whole, _ = collect(plain, build_optimizer(plain, OptimizerBlock(use="sgd", lr=0.1)))
    adapters, _ = collect(model := lora_model(), build_optimizer(model, OptimizerBlock(use="sgd", lr=0.1)))
    with pytest.raises(InputError, match="holds a whole model, and the recipe now asks for adapters"):
        restore_model(lora_model(), whole)
    with pytest.raises(InputError, match="holds adapters only, and the recipe now asks for a whole model"):
        restore_model(small_gpt(), adapters)


def test_buffers_of_a_model_with_adapters_are_saved() -> None:
    model = with_lora(Wrapped(), block(), seed=1)
    mark_base(model)
    tensors, _ = collect(model, build_optimizer(model, OptimizerBlock(use="sgd", lr=0.1)))
    assert "model.statistics.running_mean" in tensors
    assert "model.embedding.weight" not in tensors


def test_the_fingerprint_sees_every_bit_and_place_but_not_the_precision() -> None:
    weight = torch.randn(40, 30)
    assert bits_summed(weight) == bits_summed(weight.clone().double())
    swapped = weight.clone()
    swapped[[0, 1]] = weight[[1, 0]]
    flipped = weight.clone()
    flipped.view(torch.int32)[39, 29] ^= 1
    zeros = torch.zeros(40, 30)
    assert len({bits_summed(t) for t in (weight, swapped, flipped, zeros, torch.zeros(30, 30))}) == 5
    base = base_of(lora_model())
    assert base is not None
    assert base == base_of(lora_model())
    assert base != base_of(lora_model(seed=9))


def test_two_ranks_train_the_same_adapters_as_one(pool: Pool, tmp_path: Path) -> None:
    recipe = recipe_for("gpt", lora={"rank": 2}, plan={"precision": "fp64"}, steps=6)
    one, two = (run_on(pool, ranks, tmp_path / str(ranks), recipe) for ranks in (1, 2))
    for a, b in zip(one.rows, two.rows, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-9)
    for name, weight in one.weights.items():
        torch.testing.assert_close(two.weights[name], weight, rtol=1e-7, atol=1e-12)
    start = build_model(recipe, CPU, torch.float64).state_dict()
    changed = {name for name, weight in one.weights.items() if not torch.equal(weight, start[name])}
    assert changed == {name for name in start if name.endswith(("lora_a", "lora_b"))}
