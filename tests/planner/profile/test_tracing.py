"""A trace on fake tensors says what a real pass does: operators, sizes, and what is kept for backward."""

from __future__ import annotations

import resource

import pytest
import torch
from huggingface_cases import HERE
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gradus.planner.profile.assembly import _Line
from gradus.planner.profile.of_recipe import profile_of
from gradus.planner.profile.program import ModelProfile, Part
from gradus.planner.resolve import resolved
from gradus.schema.callables import import_callable
from gradus.schema.recipe import Recipe
from gradus.training.building import build_model

GPT = {"use": "gpt", "layers": 6, "width": 64, "heads": 4, "context": 32, "vocabulary": 512}
TEXT = {"use": "synthetic-tokens", "vocabulary": 512}


def recipe(model, data=TEXT, **others):
    document = {
        "name": "p",
        "model": model,
        "data": data,
        "batch": 8,
        "steps": 1,
        "optimizer": {"use": "adamw", "lr": 1e-3},
    }
    return resolved(Recipe.from_document({**document, **others}))


def built(model, data=TEXT) -> nn.Module:
    return build_model(recipe(model, data), torch.device("cpu"), torch.float32)


def profile(model, data=TEXT, precision="fp32", **options) -> ModelProfile:
    request = {name: options.pop(name) for name in ("narrow_parameters", "micro_batches") if name in options}
    return profile_of(recipe(model, data, **options), precision=precision, **request)


def kept_bytes(part: Part, samples: int) -> float:
    return sum(s.bytes.at(samples) for s in part.kept() if s.role != "copy")


def really_kept(model: nn.Module, batch) -> int:
    """Bytes that autograd holds on to after a real forward pass, parameters and inputs left out."""
    outside = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch)}
    held = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(*batch)
    del output
    return sum(size for size, _ in held.values())


def test_blocks_that_are_alike_are_one_part():
    traced = profile(GPT)
    assert [part.block for part in traced.parts] == [False, True, False]
    assert traced.calls == (0, *[1] * 6, 2)
    assert traced.parameters == sum(p.numel() for p in built(GPT).parameters())


def test_a_ghost_is_counted_as_if_it_ran():
    """With as few blocks as run for real there are no ghosts; each further block adds exactly the same again."""
    flops = [profile({**GPT, "layers": layers}).flops(4) for layers in (2, 3, 9)]
    assert flops[1] - flops[0] > 0
    assert flops[2] - flops[0] == pytest.approx(7 * (flops[1] - flops[0]), rel=1e-12)


def test_work_is_that_of_the_formula():
    model = {**GPT, "layers": 3}
    assert profile(model).flops(1) == pytest.approx(built(model).flops_per_sample(), rel=1e-3)


@pytest.mark.parametrize("samples", [2, 3, 7])
def test_a_convolutional_net_keeps_what_it_really_keeps(samples):
    images = {"use": "synthetic-images"}
    traced = profile({"use": "simple-cnn"}, images)
    model = built({"use": "simple-cnn"}, images)
    batch = torch.randn(samples, 3, 32, 32), torch.zeros(samples, dtype=torch.long)
    predicted = sum(kept_bytes(part, samples) for part in traced.called())
    assert predicted == pytest.approx(really_kept(model, batch), rel=0.01)


def test_a_transformer_keeps_what_it_really_keeps():
    traced = profile(GPT)
    model = built(GPT)
    tokens = torch.zeros(3, 32, dtype=torch.long), torch.zeros(3, 32, dtype=torch.long)
    predicted = sum(kept_bytes(part, 3) for part in traced.called())
    assert predicted == pytest.approx(really_kept(model, tokens), rel=0.02)


def test_sizes_lie_on_a_straight_line():
    near = profile(GPT, micro_batches=(2, 4))
    far = profile(GPT, micro_batches=(16, 32))
    for part, other in zip(near.parts, far.parts, strict=True):
        assert kept_bytes(part, 32) == pytest.approx(kept_bytes(other, 32), rel=1e-9)


def test_every_storage_is_made_before_it_goes():
    for part in profile(GPT, precision="bf16").parts:
        operators = len(part.operators)
        for storage in part.storages:
            assert -1 <= storage.made <= storage.last <= operators
        for number, operator in enumerate(part.operators):
            for written in operator.writes:
                assert part.storages[written].made <= number


def test_gradients_are_those_of_the_parameters():
    traced = profile(GPT)
    block = traced.parts[1]
    gradients = sum(s.bytes.fixed for s in block.storages if s.role == "gradient")
    assert gradients == 4 * block.trained


def test_divided_layers_are_known():
    block = profile(GPT).parts[1]
    divided = {w.divides: w.elements for w in block.weights}
    matrices = 12 * 64 * 64
    assert divided["tensor"] >= matrices
    assert divided["whole"] <= 4 * 64 + 2 * 64  # norms, and the biases of layers that sum over ranks
    products = [op for op in block.operators if op.kind in ("matmul", "attention")]
    assert {op.divides for op in products} == {"tensor"}
    assert {op.divides for op in block.forward if op.name == "native_layer_norm"} == {"sequence"}
    tokens = 32 * 64 * 4.0
    assert [amount.per_sample for amount in block.gathered] == [tokens] * 2
    assert [amount.per_sample for amount in block.scattered] == [tokens] * 2
    assert block.keys_and_values.per_sample == 2 * tokens


def test_bf16_keeps_narrow_activations_and_copies_of_weights():
    wide, narrow = profile(GPT), profile(GPT, precision="bf16")
    assert kept_bytes(narrow.parts[1], 8) < 0.75 * kept_bytes(wide.parts[1], 8)
    copies = sum(s.bytes.fixed for s in narrow.parts[1].storages if s.role == "copy")
    assert copies == pytest.approx(2 * 12 * 64 * 64, rel=0.05)


def test_gathered_parameters_need_no_copies():
    """Except those of norms, which are computed in fp32."""
    narrow = profile(GPT, precision="bf16", narrow_parameters=True)
    copies = [s.bytes.fixed for part in narrow.parts for s in part.storages if s.role == "copy"]
    assert copies
    assert max(copies) <= 4 * 64


def test_frozen_parameters_have_no_gradient():
    traced = profile(GPT, freeze=["blocks.0.*", "blocks.1.*"])
    frozen = [part for part in traced.called() if part.block and part.trained == 0]
    assert len(frozen) == 2
    assert not [s for part in frozen for s in part.storages if s.role == "gradient"]


def test_experts_are_traced_without_knowing_who_chooses_whom():
    traced = profile({**GPT, "experts": 8, "experts_per_token": 2, "layers": 3})
    block = traced.parts[1]
    assert sum(w.elements for w in block.weights if w.expert) > 0.5 * block.parameters
    assert block.sent_to_experts.per_sample == 2 * 32 * 64 * 4


def test_the_largest_model_is_traced_in_little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    traced = profile({"use": "gpt3-175b"}, precision="bf16")
    assert traced.parameters == pytest.approx(175e9, rel=0.01)
    assert len(traced.parts) == 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_fp8_is_traced_with_its_own_layers():
    """Large Linear layers multiply in 8 bits, and keep 8 bits; what the plan leaves in bf16 stays so."""
    wide = {**GPT, "width": 256, "layers": 4}
    narrow, eight = profile(wide, precision="bf16"), profile(wide, precision="fp8")
    products = {op.module: op.dtype for op in eight.parts[1].forward if op.kind == "matmul"}
    assert set(products.values()) == {"float8_e4m3fn"}
    head = [op.dtype for op in eight.parts[-1].forward if op.kind == "matmul"]
    assert head == ["bfloat16"]
    assert eight.flops(4) == pytest.approx(narrow.flops(4), rel=1e-9)
    assert kept_bytes(eight.parts[1], 8) < kept_bytes(narrow.parts[1], 8)


def test_with_fp8_a_bias_is_part_of_the_product_and_its_gradient_of_the_scaling():
    block = profile({**GPT, "width": 256, "layers": 4}, precision="fp8").parts[1]
    up = {
        "forward": [op for op in block.forward if op.module.endswith("mlp.up")],
        "backward": [op for op in block.backward if op.module.endswith("mlp.up")],
    }
    assert [op.name for op in up["forward"] if op.kind != "copy"] == ["to_float8", "to_float8", "_scaled_mm"]
    weight, scales, bias = 256 * 1024, 2 * 4, 1024 * 2
    assert up["forward"][-1].read.fixed == weight + scales + bias
    names = [op.name for op in up["backward"] if op.kind != "copy"]
    assert names == ["to_float8", "turned_float8", "_scaled_mm", "_scaled_mm"]
    scale, sums = 4, 1024 * 4
    assert up["backward"][0].written.fixed == scale + sums


MODELS = """
import torch
from torch import nn


class Step(nn.Module):
    def __init__(self, stride):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, stride=stride, padding=1)

    def forward(self, x):
        return self.conv(x).relu()


class Strided(nn.Module):
    \"\"\"Blocks with the same parameters, of which one halves the image.\"\"\"

    def __init__(self, at):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.steps = nn.ModuleList(Step(2 if number == at else 1) for number in range(8))
        self.last = nn.Linear(8, 10)

    def forward(self, x):
        x = self.first(x)
        for step in self.steps:
            x = step(x)
        return self.last(x.mean((2, 3)))


class Looping(nn.Module):
    \"\"\"Runs as many operators as there are samples.\"\"\"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, 10)

    def forward(self, x):
        return torch.stack([self.layer(sample.flatten()) for sample in x])


class Turned(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer, self.table = nn.Linear(width, width), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(x.shape[-1], device=x.device).float().cos()
        return self.layer(x * self.table).relu()


class Leaving(nn.Module):
    # A block that leaves a loss of its own where the model looks for it.

    def __init__(self, width, first):
        super().__init__()
        self.layer = nn.Linear(width, width)
        if first:
            self.extra = 0.0

    def forward(self, x):
        y = self.layer(x).relu()
        self.extra = y.square().mean()
        return x + y


class Regularised(nn.Module):
    def __init__(self, blocks=6, first=False):
        super().__init__()
        self.blocks = nn.ModuleList(Leaving(64, first) for _ in range(blocks))
        self.first, self.last = nn.Linear(3 * 32 * 32, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.last(x) + sum(block.extra for block in self.blocks)


class Graphs(torch.utils.data.Dataset):
    # Graphs in one large one, and how many they are.

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"x": torch.full((5, 4), float(index))}

    @staticmethod
    def collate(samples):
        graphs = [sample["x"] for sample in samples]
        of = torch.arange(len(graphs)).repeat_interleave(5)
        return {"x": torch.cat(graphs), "of": of, "count": torch.tensor(len(graphs)), "labels": of[::5] % 3}


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, of, count):
        sums = torch.zeros(int(count), 8, device=x.device, dtype=x.dtype)
        return self.last(sums.index_add(0, of, self.layer(x).to(x.dtype)))


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.full((16,), index), torch.full((16,), index)


class Host(nn.Module):
    # It computes where no trace can follow.

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))

    def forward(self, tokens):
        return self.last(self.table(torch.from_numpy(tokens.numpy() % 10)))


class Remembering(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Turned(64) for _ in range(blocks))
        self.first, self.last = nn.Linear(3 * 32 * 32, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.last(x)
"""


@pytest.fixture
def users_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(MODELS)


def counted_flops(model: nn.Module) -> float:
    """As torch counts them on real tensors."""
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 32, 32)).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("at", [0, 3, 6])
def test_blocks_that_differ_in_a_setting_are_not_alike(users_models, at):
    """A stride is a setting like any other, although it is no parameter and no number of its own."""
    traced = profile({"use": "nets.py:Strided", "at": at}, {"use": "synthetic-images"}, loss="cross-entropy")
    model = import_callable("nets.py:Strided", "model.use")(at=at)
    assert traced.flops(1) == pytest.approx(counted_flops(model), rel=0.01)


def test_a_model_that_runs_other_operators_for_other_batches_grows_in_proportion(users_models):
    traced = profile({"use": "nets.py:Looping"}, {"use": "synthetic-images"}, loss="cross-entropy")
    assert any("in proportion" in note for note in traced.notes)
    assert traced.flops(64) == pytest.approx(16 * traced.flops(4))
    assert traced.parameters == 3 * 32 * 32 * 10 + 10


@pytest.mark.parametrize("blocks", [1, 6])
def test_what_a_first_forward_makes_and_keeps_does_not_make_others_unlike(users_models, blocks):
    """Of blocks that are alike two are run, and only those keep anything."""
    traced = profile(
        {"use": "nets.py:Remembering", "blocks": blocks}, {"use": "synthetic-images"}, loss="cross-entropy"
    )
    assert not traced.notes
    turned = 2 * 64 * 64 * blocks
    assert traced.flops(4) == pytest.approx(3 * 4 * (2 * 3072 * 64 + turned + 2 * 64 * 10) - 4 * 2 * 3072 * 64)
    assert [traced.last_product(samples) for samples in (4, 64)] == [(4, 10), (64, 10)]


@pytest.mark.parametrize("first", [False, True])
def test_what_blocks_leave_for_their_model_is_left_by_all_of_them(users_models, first):
    """Of blocks that are alike only two are run, unless the model misses something of the others."""
    model = {"use": "nets.py:Regularised", "first": first}
    traced = profile(model, {"use": "synthetic-images"}, loss="cross-entropy")
    assert not traced.notes
    whole = 3 * 2 * (3072 * 64 + 6 * 64 * 64 + 64 * 10) - 2 * 3072 * 64
    assert traced.flops(4) == pytest.approx(4 * whole, rel=0.01)


def test_what_a_model_does_with_a_number_is_not_what_it_would_do_in_a_run(users_models):
    """It trains: what a trace has for a number is not how many graphs there are."""
    traced = profile({"use": "nets.py:Pooled"}, {"use": "nets.py:Graphs"}, loss="cross-entropy")
    assert not traced.traced
    assert "could not be traced" in traced.notes[0]
    assert "after it looked at a number, of which a trace has none" in traced.notes[0]


def test_samples_of_one_row_of_whole_numbers_are_taken_for_tokens_where_nothing_can_be_traced(users_models):
    traced = profile({"use": "nets.py:Host"}, {"use": "nets.py:Tokens"}, loss="cross-entropy")
    assert not traced.traced
    assert "activations as in a transformer" in traced.notes[0]


@pytest.mark.parametrize("length", [256, 512])
def test_heads_that_share_keys_are_summed_alike_for_few_samples_and_for_many(length):
    """Over few rows, which samples do not make more, no buffer is needed."""
    model = {"use": f"{HERE}:llama", "num_attention_heads": 16, "num_key_value_heads": 2, "hidden_size": 256}
    model |= {"max_position_embeddings": 512}
    traced = profile(model, {"use": f"{HERE}:Sentences", "length": length}, "bf16")
    assert not traced.notes
    assert traced.flops(4) > 0


def test_of_a_pass_alone_the_rows_of_a_product_grow_with_the_samples(users_models):
    """Its columns do not: they would count as classes."""
    line = _Line(0, 4, only_one=True)
    linear, batched, weight = ((1, 12, 10, 3072), (4, 9, 16, 16), (1, 10, 3, 12))
    at_64 = [[size.at(64) for size in line.shape(shape, shape)] for shape in (linear, batched, weight)]
    assert at_64 == [[1, 192, 10, 3072], [64, 9, 16, 16], [1, 10, 3, 192]]


def test_an_older_gpu_multiplies_experts_one_by_one():
    mixture = {**GPT, "width": 128, "experts": 8, "experts_per_token": 2, "layers": 3}
    names = {
        capability: {
            op.name for op in profile_of(recipe(mixture), precision="bf16", capability=capability).parts[1].forward
        }
        for capability in ((8, 0), (9, 0))
    }
    assert "_grouped_mm" in names[9, 0]
    assert "_grouped_mm" not in names[8, 0]


def test_tracing_draws_no_random_numbers():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    profile({**GPT, "dropout": 0.1})
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_hugging_face_decoder_is_traced_as_it_runs_without_a_mask_of_its_own():
    """It looks whether any token is missing, for which the host waits, and leaves the mask to the kernel."""
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
    config |= {"num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 32}
    model = {"use": "huggingface", "task": "causal-lm", "config": config}
    traced = profile(model, {**TEXT, "context": 32}, "bf16")
    attention = [op for part in traced.called() for op in part.forward if op.kind == "attention"]
    assert attention
    assert all(op.causal for op in attention)
    assert sum(part.waits for part in traced.parts) == 1


def test_hugging_face_builds_no_mask_where_nothing_is_masked():
    """Its models look at the mask, and without one share keys and values between heads instead of copying them."""
    config = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    found = profile({"use": "huggingface", "task": "causal-lm", "config": config}, {**TEXT, "context": 32}, "bf16")
    block = next(part for part in found.parts if part.block)
    (attention,) = (op for op in block.forward if op.kind == "attention")
    assert attention.causal
    assert attention.shape[1:3] == ((4.0, 0.0), (2.0, 0.0))
    assert not any(op.name == "where" for op in block.forward)
