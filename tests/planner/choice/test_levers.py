"""Levers are chosen for plans that a search has found, each with its reason, and only where they can pay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from huggingface_cases import HERE
from planner_cases import GIB, Formula, site

import gradus
from gradus.planner.choice.candidates import Space, space_of
from gradus.planner.choice.levers import chosen_chunks, chunks_of, settled, with_cuda_graph
from gradus.planner.choice.reasons import gib
from gradus.planner.planning import plan_to_train, planned
from gradus.planner.profile.program import Amount, ModelProfile, Operator, Part
from gradus.planner.resolve import resolved
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan
from gradus.schema.prediction import MemoryPrediction, Verdict
from gradus.schema.recipe import Recipe

H200 = Cluster(name="one", gpus_per_node=1, gpu="NVIDIA H200", cpu_cores=16, memory_gib=128)
GPT = {"use": "gpt", "layers": 2, "width": 64, "heads": 2, "context": 1024, "vocabulary": 65536}
TEXT = {"use": "synthetic-tokens"}
LLAMA = {"vocab_size": 65536, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "max_position_embeddings": 1024}
BERT = {"model_type": "bert", "vocab_size": 65536, "max_position_embeddings": 1024}
PLAN = Plan(precision="bf16", micro_batch=32, compile=True, narrow_weights=True)  # 4 GiB of logits


class Asked(Formula):
    """10 GiB of state on GPUs of 80, and 8 of 10 ms for launching; what plans are traced for is kept."""

    def __init__(self, state: float = 10, *, launching: float = 0.008, refuses: str | None = None) -> None:
        super().__init__(state, sample=0.1)
        self.prepared: list[int] = []
        self.launching, self.refuses = launching, refuses

    def trace(self) -> ModelProfile:
        return ModelProfile("m", tokens_per_sample=1024)

    def prepare(self, plans: Iterable[Plan]) -> None:
        self.prepared += [plan.loss_chunks for plan in plans]
        if self.refuses and self.prepared:
            raise InputError("no", field=self.refuses)

    def launching_seconds(self, plan: Plan) -> float:
        return 0.0 if plan.cuda_graph else self.launching

    def seconds(self, plan: Plan) -> float | None:
        return 0.010 - (self.launching if plan.cuda_graph else 0.0)


def recipe(plan: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    document = {"name": "r", "model": GPT, "data": TEXT, "batch": 32, "steps": 3, "optimizer": {"lr": 0.1}}
    return resolved(Recipe.from_document({**document, **changes, "plan": plan or {}}))


def space(of: Recipe | None = None, on: Cluster | None = None) -> Space:
    return space_of(of or recipe(), on or site(gpus=1), 1, None)


def chosen(plan: Plan = PLAN, of: Space | None = None, asked: Asked | None = None) -> tuple[Plan, dict[str, str]]:
    return settled([plan], of or space(), asked or Asked())[0]


# --- loss_chunks


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "chunks"),
    [
        (32 * 1024, 50304, 4),  # GPT-2: 3.1 GiB
        (8 * 1024, 65536, 1),  # exactly 1 GiB
        (8 * 1024 + 1, 65536, 4),  # no fewer than four
        (32 * 1024 + 1, 65536, 8),
        (4 * 1024, 1_000_000, 2),  # in four parts, fewer than 2,048 tokens
        (2 * 1024, 1_000_000, 1),
        (10**6, None, 1),
    ],
)
def test_parts_have_at_most_a_gib_of_logits_and_at_least_2048_tokens(tokens, vocabulary, chunks):
    assert chunks_of(tokens, vocabulary) == chunks


def test_large_logits_are_computed_in_parts_and_traced_so_in_one_go():
    asked = Asked()
    plans = [
        PLAN,
        PLAN.model_copy(update={"micro_batch": 16, "accumulate": 2}),
        PLAN.model_copy(update={"micro_batch": 64}),
    ]
    found = settled(plans, space(recipe({"micro_batch": 16})), asked)
    assert [plan.loss_chunks for plan, _ in found] == [4, 4, 8]
    assert asked.prepared == [4, 4, 8]
    assert found[0][1]["loss_chunks"] == "all logits at once would take 4.0 GiB, and go through memory four times"


def test_the_loss_stays_whole_where_parts_need_more_memory():
    class Wide(Asked):
        """An output layer whose gradient is larger than the logits."""

        def memory(self, plan: Plan) -> MemoryPrediction:
            more = 3 * 2**30 if plan.loss_chunks > 1 else 0
            found = super().memory(plan)
            return found.model_copy(update={"gradients": found.gradients + more})

    plan, reasons = chosen(asked=Wide())
    assert plan.loss_chunks == 1
    assert reasons["loss_chunks"] == "in parts it would take 16.2 GiB in place of 13.2 GiB"


def test_why_a_model_refuses_is_told_without_what_everybody_knows():
    class Refuses(Asked):
        def prepare(self, plans: Iterable[Plan]) -> None:
            raise InputError("recipe: plan.loss_chunks: it uses its logits", field="plan.loss_chunks")

    plan, reasons = chosen(asked=Refuses())
    assert plan.loss_chunks == 1
    assert reasons["loss_chunks"] == "it uses its logits; else they would be computed in parts"


def test_few_classes_of_many_rows_are_not_computed_in_parts():
    """Of 8 million pixels, say: the kernel was made for rows of a vocabulary."""
    assert chosen_chunks(PLAN, (9, 0), 4096, 2**20)[0] > 1
    chunks, why = chosen_chunks(PLAN, (9, 0), 150, 2**23)
    assert (chunks, why) == (1, "the kernel that makes it no slower is for 4,096 classes and more")


@pytest.mark.parametrize("mesh", [{"replicate": 2}, {"shard": 2}])
def test_replicas_and_shards_too(mesh):
    plan = PLAN.model_copy(update={"mesh": Mesh(**mesh), "zero": 3 if "shard" in mesh else 0, "narrow_weights": False})
    assert chosen(plan)[0].loss_chunks == 4


@pytest.mark.parametrize(
    ("changes", "of", "why"),
    [
        ({"micro_batch": 8, "accumulate": 4}, "quarters", "no more than 1.0 GiB"),
        ({"precision": "fp32"}, None, None),
        ({"mesh": Mesh(tensor=2)}, None, None),
        ({"mesh": Mesh(pipeline=2)}, None, None),
        ({"mesh": Mesh(context=2)}, None, None),
        ({}, "cpu", "compute capability 8.0"),
        ({"precision": "fp16"}, "v100", "compute capability 8.0"),
        ({}, "images", None),
        ({}, "own", None),
        ({}, "masked", None),
    ],
)
def test_the_loss_stays_whole_where_parts_would_not_pay(changes, of, why):
    asked = Asked()
    plan, reasons = chosen(PLAN.model_copy(update=changes), _space(of), asked)
    assert plan.loss_chunks == 1
    assert asked.prepared == []
    assert why is None if "loss_chunks" not in reasons else why in reasons["loss_chunks"]


def _space(of: str | None) -> Space:
    if of == "cpu":
        return space(on=Cluster(name="cpu", cpu_cores=8, memory_gib=64))
    if of == "quarters":
        return space(recipe({"micro_batch": 8}))
    if of == "v100":
        return space(on=Cluster(name="v", gpus_per_node=1, gpu="Tesla V100-SXM2-32GB", cpu_cores=4, memory_gib=9))
    if of == "images":
        return space(recipe(model={"use": "resnet18"}, data={"use": "synthetic-images"}))
    if of == "own":
        return space(recipe(model={"use": f"{HERE}:llama"}, data={"use": f"{HERE}:Sentences"}))
    if of == "masked":
        return space(recipe(model={"use": "huggingface", "task": "masked-lm", "config": BERT}))
    return space()


def test_what_the_recipe_says_about_parts_stays():
    asked = Asked()
    plan, reasons = chosen(PLAN.model_copy(update={"loss_chunks": 8}), space(recipe({"loss_chunks": 8})), asked)
    assert (plan.loss_chunks, asked.prepared) == (8, [])
    assert "loss_chunks" not in reasons


def test_a_model_whose_loss_cannot_be_taken_apart_keeps_it_whole_and_why_is_said():
    of = space(recipe(model={"use": "huggingface", "task": "causal-lm", "config": {"model_type": "llama", **LLAMA}}))
    assert chosen(of=of)[0].loss_chunks == 4
    asked = Asked(refuses="plan.loss_chunks")
    plan, reasons = chosen(of=of, asked=asked)
    assert (plan.loss_chunks, asked.prepared) == (1, [4])
    assert reasons["loss_chunks"] == "no; else they would be computed in parts"
    with pytest.raises(InputError):
        chosen(of=of, asked=Asked(refuses="model"))


class Traced(Asked):
    """Of a model whose last product has so many rows for each sample, and columns; the data tells no tokens."""

    def __init__(self, rows: int, columns: int, **more: Any) -> None:
        super().__init__(**more)
        sizes = Amount(1.0), Amount(0.0, rows), Amount(columns), Amount(64.0)
        product, after = (
            Operator(name, kind, Amount(), Amount(), Amount(), "bfloat16", shape)
            for name, kind, shape in (("mm", "matmul", sizes), ("_log_softmax", "reduction", ()))
        )
        self.profile = ModelProfile("m", (Part("after the blocks", False, (product, after)),), (0,))

    def trace(self) -> ModelProfile:
        return self.profile


def test_logits_of_a_users_model_and_of_a_users_dataset_are_as_large_as_they_were_traced():
    own = space(recipe(model={"use": f"{HERE}:llama"}, data={"use": f"{HERE}:Sentences"}))
    known = {"use": "huggingface", "task": "causal-lm", "config": {"model_type": "llama", **LLAMA}}
    for of in (own, space(recipe(model=known, data={"use": f"{HERE}:Sentences"}))):
        asked = Traced(1024, 65536)
        plan, reasons = chosen(of=of, asked=asked)
        assert (plan.loss_chunks, asked.prepared) == (4, [4])
        assert reasons["loss_chunks"] == "all logits at once would take 4.0 GiB, and go through memory four times"
    few = Traced(1, 1000)
    plan, reasons = chosen(of=own, asked=few)
    assert (plan.loss_chunks, few.prepared) == (1, [])
    assert "loss_chunks" not in reasons, "of a model that is no language model nobody would ask"
    plan, reasons = chosen(of=own, asked=Traced(1024, 65536, refuses="plan.loss_chunks"))
    assert plan.loss_chunks == 1
    assert reasons["loss_chunks"] == "no; else they would be computed in parts"


# --- recompute_blocks

SELECTIVE = PLAN.model_copy(update={"recompute": "selective", "loss_chunks": 4})


class OfBlocks(Asked):
    """Eight blocks of 10 GiB of activations, of which selective recompute leaves half, besides 10 GiB of state."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit_bytes = round(limit * GIB)

    def trace(self) -> ModelProfile:
        return ModelProfile("m", (Part("block", block=True),), (0,) * 8, tokens_per_sample=1024)

    def memory(self, plan: Plan) -> MemoryPrediction:
        first = 0 if plan.recompute == "none" else 8 if plan.recompute_blocks is None else plan.recompute_blocks
        saved = {"none": 0, "selective": 5, "full": 9}[plan.recompute]
        return MemoryPrediction(optimizer=10 * GIB, activations=(80 - saved * first) * GIB)

    def verdict(self, plan: Plan) -> Verdict:
        """Tight is what would be too large by a tenth."""
        peak = self.memory(plan).peak
        return "no" if peak > self.limit_bytes else "fits" if peak * 1.1 <= self.limit_bytes else "tight"


@pytest.mark.parametrize(
    ("limit", "recompute", "blocks", "why"),
    [
        (100, "none", None, None),  # since the loss is in parts
        (99 * 0.95, "selective", 1, "the first of 8: 85.0 GiB of 94.0; with one less 90.0 GiB"),
        (80, "selective", 4, "the first of 8: 70.0 GiB of 80.0; with one less 75.0 GiB"),
        (56, "selective", None, None),  # with one less it is tight
        (54.9, "selective", None, None),  # it is tight with all of them
    ],
)
def test_no_more_blocks_are_recomputed_than_memory_asks_for(limit, recompute, blocks, why):
    asked = OfBlocks(limit)
    plan, reasons = chosen(SELECTIVE, space(recipe({"loss_chunks": 4})), asked)
    assert (plan.recompute, plan.recompute_blocks) == (recompute, blocks)
    assert asked.verdict(plan) == asked.verdict(SELECTIVE)
    assert reasons.get("recompute_blocks") == why


def test_a_block_that_is_called_twice_is_one_block():
    class Towers(OfBlocks):
        def trace(self) -> ModelProfile:
            return replace(super().trace(), calls=(0,) * 16, block_order=2 * tuple(range(8)))

    plan, reasons = chosen(SELECTIVE, space(recipe({"loss_chunks": 4})), Towers(80))
    assert plan.recompute_blocks == 4
    assert reasons["recompute_blocks"].startswith("the first of 8: ")


@pytest.mark.parametrize("said", [{"recompute": "selective"}, {"recompute": "selective", "recompute_blocks": 6}])
def test_who_says_what_to_recompute_means_it(said):
    plan, reasons = chosen(SELECTIVE.model_copy(update=said), space(recipe(said)), OfBlocks(80))
    assert plan.recompute_blocks == said.get("recompute_blocks")
    assert "recompute_blocks" not in reasons


def test_stages_of_a_pipeline_recompute_all_of_their_blocks():
    asked = OfBlocks(80)
    plan = SELECTIVE.model_copy(update={"mesh": Mesh(pipeline=2), "accumulate": 4, "narrow_weights": False})
    assert chosen(plan, space(), asked)[0] == plan


# --- micro_batch


class OfSamples(OfBlocks):
    """As many GiB as blocks of 32 samples have, for as many samples; accumulating takes a fifth longer."""

    def memory(self, plan: Plan) -> MemoryPrediction:
        whole = super().memory(plan)
        logits = 16 * GIB // plan.loss_chunks
        return whole.model_copy(
            update={name: size * plan.micro_batch // 32 for name, size in (("activations", whole.activations),)}
            | {"logits": logits * plan.micro_batch // 32}
        )

    def seconds(self, plan: Plan) -> float | None:
        again = {"none": 0.0, "selective": 0.001, "full": 0.1}[plan.recompute] * (plan.recompute_blocks or 8)
        return 0.1 * (1.2 if plan.accumulate > 1 else 1.0) + again


HALVES = PLAN.model_copy(update={"micro_batch": 16, "accumulate": 2})


def test_one_gpu_takes_all_samples_at_once_in_the_room_that_parts_and_recomputing_make():
    """Halves take 58 GiB. The whole takes 106; with the loss in four parts 94, and 5 less for each block."""
    plan, reasons = chosen(HALVES, asked=OfSamples(80 * 1.1))
    assert (plan.micro_batch, plan.accumulate, plan.loss_chunks) == (32, 1, 4)
    assert (plan.recompute, plan.recompute_blocks) == ("selective", 3)
    assert reasons["micro_batch"] == "in micro-batches of 16 a step would take 0.12 s, so 0.103"
    assert reasons["loss_chunks"].startswith("all logits at once would take 4.0 GiB")
    assert reasons["recompute_blocks"] == "the first of 8: 79.0 GiB of 88.0; with one less 84.0 GiB"


def test_parts_are_not_traced_where_all_but_the_logits_is_too_large_already():
    asked = OfSamples(29)  # eight samples have 20 GiB beside 10 of state
    fours = HALVES.model_copy(update={"micro_batch": 4, "accumulate": 8})
    plan, _ = chosen(fours, space(recipe({"recompute": "none"})), asked)
    assert plan.micro_batch == 4
    assert asked.prepared == []


@pytest.mark.parametrize(("slower", "size", "traced"), [(1.01, 8, []), (1.2, 32, [4])])
def test_parts_are_traced_only_where_a_larger_micro_batch_would_be_faster_with_room(slower, size, traced):
    class Accumulating(OfSamples):
        def seconds(self, plan: Plan) -> float | None:
            return 0.1 * (slower if plan.accumulate > 1 else 1.0)

    asked = Accumulating(200)
    plan, _ = chosen(HALVES.model_copy(update={"micro_batch": 8, "accumulate": 4}), space(recipe()), asked)
    assert plan.micro_batch == size
    assert asked.prepared == traced


@pytest.mark.parametrize(
    ("changes", "fixed", "limit"),
    [
        ({}, {}, 50),  # all at once takes 54, if cheap things are recomputed, and 22 with all: too slow
        ({"mesh": Mesh(replicate=2), "micro_batch": 8, "narrow_weights": False}, {}, 200),
        ({}, {"micro_batch": 16}, 200),
        ({}, {"accumulate": 2}, 200),
        ({}, {"recompute": "none"}, 90),
    ],
)
def test_micro_batches_stay_where_larger_ones_do_not_pay_or_may_not_be(changes, fixed, limit):
    plan = HALVES.model_copy(update=changes)
    found, reasons = chosen(plan, space(recipe(fixed)), OfSamples(limit))
    assert (found.micro_batch, found.accumulate, found.recompute) == (plan.micro_batch, plan.accumulate, "none")
    assert "micro_batch" not in reasons


# --- cuda_graph


def test_a_step_that_waits_for_its_launches_is_recorded_and_the_reason_has_the_numbers():
    plan, reasons = chosen()
    assert plan.cuda_graph
    assert reasons["cuda_graph"] == (
        "three launches for a step: else 8 of 10 ms the device waits for the host, and 2 are left"
    )
    plan, reasons = chosen(asked=Asked(launching=0.00005))
    assert not plan.cuda_graph
    assert reasons["cuda_graph"] == "the device hardly waits for the host, and a recorded step keeps its memory"


@pytest.mark.parametrize(
    ("plan", "changes", "state", "why"),
    [
        ({}, {"on_nan": "skip"}, 10, "on_nan is skip"),
        ({}, {"optimizer": {"use": "lamb", "lr": 0.1}}, 10, "the optimizer is lamb"),
        ({"accumulate": 2, "micro_batch": 16}, {}, 10, "accumulate is 2"),
        ({"mesh": Mesh(replicate=2), "narrow_weights": False}, {}, 10, "the mesh has 2 ranks"),
        ({}, {"model": {"use": f"{HERE}:llama"}, "data": {"use": f"{HERE}:Sentences"}}, 10, "the recipe can say true"),
        ({}, {"data": {**TEXT, "group_by_length": 4}}, 10, "grouped by length have other shapes"),
        ({}, {"hooks": ["ema"]}, 10, "what hooks do"),
        ({}, {"loss": {"use": "torch.nn:CrossEntropyLoss"}}, 10, "does on the host would be frozen"),
        ({"recompute": "full", "compile": False}, {}, 10, "recomputing without compile"),
        ({}, {}, 60, "63.2 GiB of 80.0: a recorded step keeps them"),
    ],
)
def test_a_step_is_launched_as_ever_where_a_recording_might_not_do(plan, changes, state, why):
    found, reasons = chosen(PLAN.model_copy(update=plan), space(recipe(**changes)), Asked(state))
    assert not found.cuda_graph
    assert why in reasons["cuda_graph"]


def test_packed_documents_are_not_recorded(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n' * 50)
    data = {"use": "text", "path": str(tmp_path / "text.jsonl"), "tokenizer": "bytes", "packing": True}
    found, reasons = chosen(of=space(recipe(data=data)))
    assert not found.cuda_graph
    assert "packed documents" in reasons["cuda_graph"]


def test_without_a_known_memory_nothing_is_recorded():
    asked = Asked()
    asked.limit_bytes = None
    assert "not known" in chosen(asked=asked)[1]["cuda_graph"]


def test_a_compiled_step_may_recompute_and_up_to_three_fifths_of_the_memory_may_be_recorded():
    assert chosen(PLAN.model_copy(update={"recompute": "full"}))[0].cuda_graph
    assert chosen(asked=Asked(48 - 3.2))[0].cuda_graph


@pytest.mark.parametrize("said", [True, False])
def test_what_the_recipe_says_about_graphs_stays(said):
    plan = PLAN.model_copy(update={"cuda_graph": said})
    assert with_cuda_graph(plan, space(recipe({"cuda_graph": said})), Asked(70)) == (plan, {})


# --- all of it


def test_a_plan_for_one_gpu_has_levers_and_predicts_them():
    best = planned(recipe(batch=32), H200, 1).choices[0]
    assert best.prediction is not None
    assert (best.plan.narrow_weights, best.plan.loss_chunks) == (True, 4)
    why = "weights are rounded once a step, and layers add up in 16 bits"
    assert best.reasons["narrow_weights"] == why, "without the gain of another model"
    assert "4.0 GiB" in best.reasons["loss_chunks"]
    assert best.reasons["recompute"] == f"fits without: {gib(best.prediction.memory.peak)} of 138.2", "with its levers"
    without = {"narrow_weights": False, "loss_chunks": 1, "cuda_graph": False}
    plain = planned(recipe(without, batch=32), H200, 1).choices[0]
    assert plain.prediction is not None
    assert best.prediction.memory.peak < plain.prediction.memory.peak
    assert best.prediction.memory.logits < plain.prediction.memory.logits
    assert {plain.reasons[name] for name in without} == {"fixed by the recipe"}
    assert not any("launched as graphs" in said for said in plain.prediction.basis)


def test_a_users_llama_with_a_users_data_has_its_loss_in_parts():
    own = {"model": {"use": f"{HERE}:llama", "vocab_size": 65536, "max_position_embeddings": 1024}}
    best = planned(recipe(**own, data={"use": f"{HERE}:Sentences", "length": 1024}), H200, 1).choices[0]
    assert best.plan.loss_chunks == 4
    assert "4.0 GiB" in best.reasons["loss_chunks"]


def test_an_output_layer_with_an_adapter_beside_it_is_not_left_to_a_loss_in_parts():
    """Which multiplies by the layer's weight alone."""
    adapted = {"model": {**GPT, "tied": False}, "lora": {"rank": 4, "targets": ["head.output"]}}
    plan = planned(recipe(**adapted), H200, 1).choices[0].plan
    assert plan.loss_chunks == 1
    with pytest.raises(InputError, match="adapter"):
        planned(recipe({"loss_chunks": 4}, **adapted), H200, 1)
    elsewhere = {**adapted, "lora": {"rank": 4, "targets": ["blocks.*.attention.qkv"]}}
    assert planned(recipe(**elsewhere), H200, 1).choices[0].plan.loss_chunks > 1


def test_a_plan_for_a_tiny_model_has_graphs_and_predicts_them():
    tiny = {"use": "gpt", "layers": 4, "width": 64, "heads": 2, "context": 64, "vocabulary": 256}
    best = planned(recipe(model=tiny, data={**TEXT, "context": 64}, batch=4), H200, 1).choices[0]
    assert best.plan.cuda_graph
    assert "three launches" in best.reasons["cuda_graph"]
    assert best.prediction is not None
    assert best.prediction.step is not None
    assert best.prediction.step.total < 0.002
    assert any("launched as graphs" in said for said in best.prediction.basis)


def test_a_model_that_was_traced_with_narrow_weights_gets_them_whoever_wrote_it():
    own = recipe(model={"use": f"{HERE}:llama"}, data={"use": f"{HERE}:Sentences"}, batch=4)
    best = planned(own, H200, 1).choices[0]
    assert best.plan.narrow_weights
    assert not best.plan.cuda_graph
    said = "what LlamaForCausalLM does on the host would be frozen; the recipe can say true"
    assert best.reasons["cuda_graph"] == said, "the model's class, and not the function that builds it"


def test_a_model_that_cannot_compute_in_16_bits_keeps_its_weights(tmp_path):
    (tmp_path / "wide.py").write_text(
        "from torch import nn\nimport torch\n"
        "class Wide(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(8, 4)\n"
        "    def forward(self, x):\n"
        "        if self.layer.weight.dtype != torch.float32:\n"
        "            raise RuntimeError('only float32')\n"
        "        return self.layer(x)\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n        return 64\n"
        "    def __getitem__(self, n):\n        return torch.ones(8), n % 4\n"
    )
    own = {"model": {"use": f"{tmp_path}/wide.py:Wide"}, "data": {"use": f"{tmp_path}/wide.py:Data"}}
    best = planned(recipe(**own, loss="cross-entropy"), H200, 1).choices[0]
    assert not best.plan.narrow_weights
    assert best.reasons["narrow_weights"] == "with weights in 16 bits the model failed: RuntimeError: only float32"
    assert best.prediction is not None
    assert best.prediction.verdict == "fits", "traced as it is"


def test_where_copies_of_the_weights_do_not_fit_the_parameters_are_computed_with():
    deep = {**GPT, "layers": 8, "width": 1024, "heads": 8, "context": 64, "vocabulary": 256}
    of = recipe({"micro_batch": 1, "accumulate": 8}, model=deep, batch=8)
    free = planned(of, H200, 1).choices[0]
    assert free.plan.narrow_weights
    peaks = [
        planned(
            recipe(
                {**of.plan.model_dump(include={"micro_batch", "accumulate"}), "narrow_weights": narrow},
                model=deep,
                batch=8,
            ),
            H200,
            1,
        )
        .choices[0]
        .prediction.memory.peak
        for narrow in (True, False)
    ]
    assert peaks[1] < peaks[0]
    limit = (peaks[0] + peaks[1]) / 2
    small = site(gpus=1, memory_gib=limit / 2**30 * 1.08)
    best = planned(of, small, 1).choices[0]
    assert (best.plan.narrow_weights, best.prediction.verdict) == (False, "fits")
    assert "with copies in 16 bits it needs" in best.reasons["narrow_weights"]


@pytest.mark.parametrize("said", [{}, {"recompute": "full"}])
def test_more_blocks_than_the_model_has_are_refused_with_their_number(said):
    own = recipe({"recompute_blocks": 9, **said}, model={"use": f"{HERE}:llama"}, data={"use": f"{HERE}:Sentences"})
    has = r"plan.recompute_blocks: found 9, but LlamaForCausalLM has 2 blocks"
    with pytest.raises(InputError, match=has) as caught:
        planned(own, H200, 1)
    assert caught.value.details["allowed"] == "1 to 2, or null for all"
    with pytest.raises(InputError, match=has):
        plan_to_train(own, H200, 1)
    with pytest.raises(InputError, match=has):
        gradus.predict(own, H200, {"recompute": "selective"})
    here = Cluster(name="here", gpus_per_node=0, cpu_cores=4, memory_gib=16)
    with pytest.raises(InputError, match="found 3, but gpt has 2 blocks"):
        plan_to_train(recipe({"recompute_blocks": 3, "recompute": "selective"}), here, 1)


def test_who_says_how_many_blocks_has_them_recomputed_and_reads_why():
    best = planned(recipe({"recompute_blocks": 2}), H200, 1).choices[0]
    assert (best.plan.recompute, best.plan.recompute_blocks) == ("selective", 2)
    assert best.reasons["recompute"] == "recompute_blocks is 2, so that some are recomputed; selective costs least"


@pytest.mark.parametrize("chunks", [48, 49])
def test_more_parts_of_a_loss_than_there_are_tokens_are_told(chunks):
    """Nobody but the trace knows of a model of one's own how many there are: 4 samples of 12."""
    own = {"model": {"use": f"{HERE}:llama"}, "data": {"use": f"{HERE}:Sentences"}}
    notes = planned(recipe({"loss_chunks": chunks}, batch=4, **own), H200, 1).notes
    told = ["plan.loss_chunks is 49, and a micro-batch has 48 tokens: each is a part of its own"]
    assert [note for note in notes if "loss_chunks" in note] == told * (chunks > 48)
