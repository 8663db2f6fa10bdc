"""Every combination that cannot be is refused in one line with the reason, before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configurations import CONFIGURATIONS, Configuration
from gradus_command import Gradus
from pool import Pool
from schedule_cases import accepted_by_torch

from gradus.parallel.case import Case
from gradus.parallel.split_rules import TENSOR_STYLES, micro_batches_fit
from gradus.parallel.support import RULES, check_supported
from gradus.planner.defaults import default_plan
from gradus.planner.model_facts import facts_of
from gradus.schema.cluster import Cluster, GpuNumbers
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe

CPU = Cluster(name="laptop", cpu_cores=8, memory_gib=16)
GPT = {"use": "gpt", "layers": 4, "width": 64, "heads": 4, "context": 32}
MIXTURE = {**GPT, "experts": 6}
LATENT = {**GPT, "attention": "latent", "kv_rank": 16, "positions": "rotary"}
IMAGES = {"data": {"use": "synthetic-images"}}
RESNET = {"model": {"use": "resnet18"}, **IMAGES}
HUGGINGFACE = {"model": {"use": "huggingface", "config": {"model_type": "gpt2"}, "task": "causal-lm"}}
OWN = {"model": {"use": "own.py:Net"}}
PARTS = {"pipeline_parts": ["embedding", "layers", "output"]}


def gpus(major: int, minor: int) -> Cluster:
    gpu = GpuNumbers(name=f"GPU {major}{minor}", memory_gib=80, compute_capability=[major, minor])
    return Cluster(name="box", gpus_per_node=8, gpu=gpu, cpu_cores=64, memory_gib=512)


H100, A100, V100 = gpus(9, 0), gpus(8, 0), gpus(7, 0)


def recipe(plan: dict[str, Any], **more: Any) -> Recipe:
    text = {"model": GPT, "data": {"use": "synthetic-tokens"}}
    basics = {"name": "tiny", "batch": 16, "steps": 3, "optimizer": {"lr": 0.1}}
    return Recipe.from_document({**basics, **text, "plan": plan, **more})


# rule, plan, what else the recipe has, where it is to run, and the message after "FIELD: found VALUE, but "
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], Cluster, str]] = [
    (
        "own loop, pipeline",
        {"mesh": {"pipeline": 2}},
        {"model": {"use": "own"}},
        CPU,
        "plan.mesh.pipeline: found 2, but an own loop cannot express a pipeline schedule",
    ),
    (
        "tensor, no plan for the layers",
        {"mesh": {"tensor": 2}},
        OWN,
        CPU,
        "plan.mesh.tensor: found 2, but nothing says how the layers of Net are split",
    ),
    (
        "tensor, no plan for the layers",
        {"mesh": {"tensor": 2}},
        RESNET,
        CPU,
        "plan.mesh.tensor: found 2, but the layers of resnet18 are not split by tensor",
    ),
    (
        "tensor does not divide",
        {"mesh": {"tensor": 3}},
        {},
        CPU,
        "plan.mesh.tensor: found 3, but gpt has 4 heads, which 3 ranks cannot share evenly",
    ),
    (
        "tensor does not divide",
        {"mesh": {"tensor": 4}},
        {"model": {**GPT, "kv_heads": 2}},
        CPU,
        "plan.mesh.tensor: found 4, but gpt has 2 key-value heads, which 4 ranks cannot share evenly",
    ),
    (
        "tensor does not divide",
        {"mesh": {"tensor": 4}},
        {"model": {**GPT, "inner": 70}},
        CPU,
        "plan.mesh.tensor: found 4, but gpt has 70 numbers inside its MLP, which 4 ranks cannot share evenly",
    ),
    (
        "tensor_plan, unknown style",
        {"mesh": {"tensor": 2}},
        {**OWN, "tensor_plan": {"layers.*.q": "colwize"}},
        CPU,
        "tensor_plan: unknown style of 'layers.*.q': 'colwize'; did you mean 'colwise'? Allowed: "
        + ", ".join(sorted(TENSOR_STYLES)),
    ),
    (
        "tensor, experts or latent attention",
        {"mesh": {"tensor": 2}},
        {"model": MIXTURE},
        CPU,
        "plan.mesh.tensor: found 2, but the experts of gpt are not split by tensor",
    ),
    (
        "tensor, experts or latent attention",
        {"mesh": {"tensor": 2}},
        {"model": LATENT},
        CPU,
        "plan.mesh.tensor: found 2, but the latent attention of gpt is not split by tensor",
    ),
    (
        "sequence parallel, length",
        {"mesh": {"tensor": 4}},
        {"data": {"use": "synthetic-tokens", "context": 30}},
        CPU,
        "plan.sequence_parallel: found true, but sequences of 30 tokens cannot be cut into 4 slices (tensor × context)",
    ),
    (
        "tensor, lora",
        {"mesh": {"tensor": 2}},
        {"lora": {"rank": 2}},
        CPU,
        "plan.mesh.tensor: found 2, but the small matrices of lora are not split by tensor",
    ),
    (
        "tensor, fp8",
        {"mesh": {"tensor": 2}, "precision": "fp8"},
        {},
        CPU,
        "plan.mesh.tensor: found 2, but products in 8 bits are not divided over ranks: their scales are of whole "
        "matrices",
    ),
    (
        "context, model",
        {"mesh": {"context": 2}},
        {"model": {"use": "vit"}, **IMAGES},
        CPU,
        "plan.mesh.context: found 2, but vit does not take a part of a sequence",
    ),
    (
        "context, model",
        {"mesh": {"context": 2}},
        HUGGINGFACE,
        CPU,
        "plan.mesh.context: found 2, but the Hugging Face model does not take a part of a sequence",
    ),
    (
        "context does not divide",
        {"mesh": {"context": 3}},
        {},
        CPU,
        "plan.mesh.context: found 3, but sequences of 32 tokens cannot be cut into 6 pieces, two for each rank",
    ),
    (
        "context, ring",
        {"mesh": {"context": 2}, "context_attention": "ring"},
        {"model": {**GPT, "dropout": 0.1}},
        CPU,
        "plan.context_attention: found ring, but the ring cannot repeat in backward what dropout (0.1) left out",
    ),
    (
        "context, ring",
        {"mesh": {"context": 2}, "context_attention": "ring"},
        {"model": LATENT},
        CPU,
        "plan.context_attention: found ring, but its kernel needs values as wide as keys, and a head of gpt has 16 and "
        "24",
    ),
    (
        "context, ring",
        {"mesh": {"context": 2}, "context_attention": "ring"},
        {"model": {**GPT, "width": 48}},
        H100,
        "plan.context_attention: found ring, but its kernel takes heads of 8, 16 to 256 numbers, and they have 12",
    ),
    (
        "context, ring",
        {"mesh": {"context": 2}, "context_attention": "ring", "precision": "fp32"},
        {},
        H100,
        "plan.context_attention: found ring, but its kernel computes in bf16 and fp16, and plan.precision is fp32",
    ),
    (
        "context, capacity of experts",
        {"mesh": {"context": 2}},
        {"model": {**MIXTURE, "capacity_factor": 1.5}},
        CPU,
        "plan.mesh.context: found 2, but an expert of gpt takes a share of each sequence (capacity_factor 1.5), and no "
        "rank sees a whole one",
    ),
    (
        "pipeline, model",
        {"mesh": {"pipeline": 2}},
        OWN,
        CPU,
        "plan.mesh.pipeline: found 2, but nothing says where Net may be cut into stages",
    ),
    (
        "pipeline, model",
        {"mesh": {"pipeline": 2}},
        HUGGINGFACE,
        CPU,
        "plan.mesh.pipeline: found 2, but nothing says where the Hugging Face model may be cut into stages",
    ),
    (
        "pipeline, model",
        {"mesh": {"pipeline": 2}},
        RESNET,
        CPU,
        "plan.mesh.pipeline: found 2, but resnet18 is no list of equal blocks that could be cut into stages",
    ),
    (
        "pipeline, no loss",
        {"mesh": {"pipeline": 2}},
        {**OWN, **PARTS},
        CPU,
        "plan.mesh.pipeline: found 2, but the last stage of Net needs a loss of its own: the model's forward is not "
        "called",
    ),
    (
        "pipeline, balance loss",
        {"mesh": {"pipeline": 2}},
        {"model": {**MIXTURE, "balance": "loss"}},
        CPU,
        "plan.mesh.pipeline: found 2, but the balance loss of gpt is added in its forward, which stages do not call",
    ),
    (
        "pipeline, more stages than blocks",
        {"mesh": {"pipeline": 8}},
        {},
        CPU,
        "plan.mesh.pipeline: found 8 × stages_per_rank 1 = 8 stages, but the model has 4 blocks, and each stage needs "
        "one",
    ),
    (
        "pipeline, more stages than blocks",
        {"mesh": {"pipeline": 2}, "stage_blocks": [3, 2]},
        {},
        CPU,
        "plan.stage_blocks: found [3, 2], 2 stages with 5 blocks, but there are 2 stages and 4 blocks, one for each "
        "stage at least",
    ),
    (
        "several stages on a rank",
        {"mesh": {"pipeline": 2}, "stages_per_rank": 2},
        {},
        CPU,
        "plan.stages_per_rank: found 2, but 1f1b has one on each rank",
    ),
    (
        "several stages on a rank",
        {"stages_per_rank": 2, "pipeline_schedule": "interleaved"},
        {},
        CPU,
        "plan.stages_per_rank: found 2, but there is no pipeline",
    ),
    (
        "pipeline, micro-batches",
        {"mesh": {"pipeline": 4}, "accumulate": 2},
        {},
        CPU,
        "plan.accumulate: found 2, but 1f1b over 4 stages needs at least 4 micro-batches",
    ),
    (
        "pipeline, micro-batches",
        {"mesh": {"pipeline": 2}, "accumulate": 5, "pipeline_schedule": "interleaved"},
        {"batch": 15},
        CPU,
        "plan.accumulate: found 5, but interleaved over 2 stages needs micro-batches in 2 rounds of equal size",
    ),
    (
        "pipeline, micro-batches",
        {"mesh": {"pipeline": 2}, "accumulate": 7, "pipeline_schedule": "zero-bubble"},
        {"batch": 14},
        CPU,
        "plan.accumulate: found 7, but zero-bubble over 2 stages needs micro-batches in 3 rounds of equal size",
    ),
    (
        "zero-bubble, zero 3",
        {"mesh": {"pipeline": 2, "shard": 2}, "zero": 3, "accumulate": 2, "pipeline_schedule": "zero-bubble"},
        {},
        CPU,
        "plan.zero: found 3, but zero-bubble needs whole parameters between the two halves of backward, and zero 3 "
        "lets go of them",
    ),
    (
        "zero-bubble, compile",
        {"mesh": {"pipeline": 2}, "pipeline_schedule": "zero-bubble", "compile": True},
        {},
        CPU,
        "plan.compile: found true, but zero-bubble takes backward apart, which torch cannot do with compiled stages",
    ),
    (
        "zero-bubble, selective recompute",
        {"mesh": {"pipeline": 2}, "pipeline_schedule": "zero-bubble", "recompute": "selective"},
        {},
        CPU,
        "plan.recompute: found selective, but zero-bubble takes backward apart, and what selective keeps can be used "
        "only once",
    ),
    (
        "pipeline, fp16",
        {"mesh": {"pipeline": 2}, "precision": "fp16"},
        {},
        CPU,
        "plan.precision: found fp16, but its loss scaling looks at all gradients of a step at once, and stages have "
        "them in turn",
    ),
    (
        "batch normalisation, accumulate",
        {"accumulate": 2},
        RESNET,
        CPU,
        "plan.accumulate: found 2, but resnet18 has batch normalisation, whose statistics are those of the whole batch",
    ),
    (
        "expert, model",
        {"mesh": {"shard": 2, "expert": 2}, "zero": 1},
        {},
        CPU,
        "plan.mesh.expert: found 2, but gpt has no experts to spread",
    ),
    (
        "expert, model",
        {"mesh": {"shard": 4, "expert": 4}, "zero": 1},
        {"model": MIXTURE},
        CPU,
        "plan.mesh.expert: found 4, but gpt has 6 experts, which 4 ranks cannot share evenly",
    ),
    (
        "expert, zero 0",
        {"mesh": {"context": 2, "expert": 2}},
        {"model": MIXTURE},
        CPU,
        "plan.mesh.expert: found 2, but zero is 0: experts are spread over ranks that share parameters",
    ),
    (
        "expert, selective recomputation",
        {"mesh": {"shard": 2, "expert": 2}, "zero": 1, "recompute": "selective"},
        {"model": MIXTURE},
        CPU,
        "plan.recompute: found selective, but experts that are spread over ranks gather their parameters inside a "
        "block, and selective recomputation needs a block that does exactly the same twice",
    ),
    (
        "offload, zero 0",
        {"offload": "cpu"},
        {},
        CPU,
        "plan.offload: found cpu, but zero is 0: it is the shards of parameters and optimizer state that wait in host "
        "memory",
    ),
    (
        "channels_last, sharded",
        {"mesh": {"shard": 2}, "zero": 1, "channels_last": True},
        RESNET,
        CPU,
        "plan.channels_last: found true, but FSDP2 divides only weights that lie in memory row by row",
    ),
    (
        "synchronise_every, not only replicas",
        {"mesh": {"replicate": 2, "tensor": 2}, "synchronise_every": 4},
        {},
        CPU,
        "plan.synchronise_every: found 4, but only whole replicas can step alone, and the mesh is replicate 2 × "
        "tensor 2",
    ),
    (
        "synchronise_every, fp16",
        {"mesh": {"replicate": 2}, "synchronise_every": 4, "precision": "fp16"},
        {},
        CPU,
        "plan.synchronise_every: found 4, but with fp16 each replica would skip other steps, when its own gradients "
        "overflow, and be at another step",
    ),
    (
        "synchronise_every, experts",
        {"mesh": {"replicate": 2}, "synchronise_every": 4},
        {"model": MIXTURE},
        CPU,
        "plan.synchronise_every: found 4, but the experts of replicas that step alone would be balanced apart, and "
        "never meet",
    ),
    (
        "compression, sharded and accumulating",
        {"mesh": {"shard": 2}, "zero": 1, "accumulate": 2, "compression": "bf16"},
        {},
        CPU,
        "plan.compression: found bf16, but FSDP2 would also add up the gradients of 2 micro-batches in it",
    ),
    (
        "synchronise_every, compression",
        {"mesh": {"replicate": 2}, "synchronise_every": 4, "compression": "bf16"},
        {},
        CPU,
        "plan.compression: found bf16, but with synchronise_every 4 parameters travel, and no gradients that it could "
        "shorten",
    ),
    (
        "precision, device",
        {"precision": "fp8"},
        {},
        CPU,
        "plan.precision: found fp8, but the CPU has no FP8 matrix multiplication",
    ),
    (
        "precision, device",
        {"precision": "tf32"},
        {},
        CPU,
        "plan.precision: found tf32, but TF32 is a mode of NVIDIA tensor cores",
    ),
    (
        "precision, device",
        {"precision": "fp8"},
        {},
        A100,
        "plan.precision: found fp8, but it needs compute capability 8.9 or newer, and GPU 80 has 8.0",
    ),
    (
        "precision, device",
        {"precision": "fp8", "fp8_scaling": "mx"},
        {},
        H100,
        "plan.fp8_scaling: found mx, but MXFP8 needs compute capability 10.0 or newer, and GPU 90 has 9.0",
    ),
    (
        "precision, device",
        {"precision": "fp8", "fp8_scaling": "block"},
        {},
        gpus(8, 9),
        "plan.fp8_scaling: found block, but fp8 with a scale for each block needs compute capability 9.0 or newer, and "
        "GPU 89 has 8.9",
    ),
    (
        "precision, device",
        {"precision": "bf16"},
        {},
        V100,
        "plan.precision: found bf16, but it needs compute capability 8.0 or newer, and GPU 70 has 7.0",
    ),
    (
        "several ranks on a GPU, pipeline",
        {"mesh": {"pipeline": 2}, "ranks_per_gpu": 2},
        {},
        H100,
        "plan.ranks_per_gpu: found 2, but ranks that share a GPU talk through gloo, which cannot send from one "
        "pipeline stage to the next there",
    ),
]


@pytest.mark.parametrize(
    ("rule", "plan", "more", "cluster", "message"),
    [pytest.param(*case, id=f"{case[0]}: {case[1]}") for case in REFUSED],
)
def test_it_is_refused_in_one_line_with_the_reason_and_what_to_do(rule, plan, more, cluster, message):
    given = recipe(plan, **more)
    with pytest.raises(InputError) as caught:
        default_plan(given, cluster, own_loop=rule.startswith("own loop"))
    error = caught.value
    assert error.message.removeprefix("recipe: ") == message
    assert "\n" not in error.message
    assert error.hint or error.details.get("nearest")
    assert {"field", "found", "allowed"} <= error.details.keys()


@pytest.mark.parametrize(
    ("rule", "plan", "more", "cluster", "message"),
    [pytest.param(*case, id=f"{case[0]}: {case[1]}") for case in REFUSED],
)
def test_it_is_that_very_rule_that_refuses(rule, plan, more, cluster, message):
    given = recipe(plan, **more)
    capability = tuple(cluster.gpu.compute_capability) if isinstance(cluster.gpu, GpuNumbers) else None
    share = given.batch // given.plan.mesh.data_ranks
    whole = given.plan.model_copy(update={"micro_batch": max(1, share // given.plan.accumulate)})
    own_loop = rule.startswith("own loop")
    case = Case(given, whole, facts_of(given), cluster.gpus_per_node > 0, cluster.gpu_name, capability, own_loop)
    refusal = RULES[rule](case)
    assert refusal is not None
    assert refusal.message == message


def test_every_rule_of_the_table_has_a_case():
    assert {case[0] for case in REFUSED} == set(RULES)


# What works is not refused: each is close to something that is.
@pytest.mark.parametrize(
    ("plan", "more", "cluster"),
    [
        ({}, {}, CPU),
        ({"mesh": {"tensor": 4, "pipeline": 4, "replicate": 2}}, {}, CPU),
        ({"mesh": {"tensor": 2}}, {**OWN, "tensor_plan": {"*.q": "colwise", "*.out": "rowwise"}}, CPU),
        ({"mesh": {"tensor": 2}}, HUGGINGFACE, CPU),
        (
            {"mesh": {"tensor": 2}, "sequence_parallel": False},
            {"data": {"use": "synthetic-tokens", "context": 31}},
            CPU,
        ),
        ({"mesh": {"tensor": 2}}, {"model": {**GPT, "context": 31}}, CPU),
        ({"mesh": {"tensor": 3}}, {"model": {"use": "vit"}, **IMAGES}, CPU),
        ({"mesh": {"shard": 2}}, {"lora": {"rank": 2}}, CPU),
        ({"mesh": {"context": 2, "shard": 2}}, {"model": {**GPT, "use": "bert"}}, CPU),
        ({"mesh": {"context": 2}, "context_attention": "ring"}, {}, H100),
        ({"mesh": {"context": 2}}, OWN, CPU),
        ({"mesh": {"pipeline": 2}}, {**OWN, **PARTS, "loss": "cross-entropy"}, CPU),
        ({"mesh": {"pipeline": 4}, "pipeline_schedule": "gpipe", "accumulate": 2}, {}, CPU),
        ({"mesh": {"pipeline": 2}, "pipeline_schedule": "interleaved", "accumulate": 1}, {}, CPU),
        ({"mesh": {"pipeline": 2}, "stage_blocks": [3, 1]}, {}, CPU),
        ({"mesh": {"pipeline": 2}, "pipeline_schedule": "zero-bubble", "recompute": "full"}, {}, CPU),
        ({"mesh": {"pipeline": 2}, "recompute": "selective"}, {}, CPU),
        ({"mesh": {"context": 2}}, {"model": LATENT}, H100),
        ({"mesh": {"pipeline": 2}, "compile": True}, {}, H100),
        ({"pipeline_schedule": "zero-bubble", "compile": True}, {}, H100),
        ({"mesh": {"pipeline": 2, "shard": 2}, "zero": 2}, {}, CPU),
        ({"mesh": {"shard": 2, "context": 2, "expert": 2}}, {"model": MIXTURE}, CPU),
        ({"mesh": {"replicate": 2}}, {"model": {**MIXTURE, "capacity_factor": 1.5}}, CPU),
        ({"mesh": {"pipeline": 2}}, {"model": {**MIXTURE, "balance": "bias"}}, CPU),
        ({"mesh": {"shard": 2}, "offload": "cpu", "zero": 1}, {}, CPU),
        ({"mesh": {"replicate": 4}, "synchronise_every": 4}, {}, CPU),
        ({"mesh": {"replicate": 4}, "compression": "bf16"}, {}, CPU),
        ({"mesh": {"shard": 2}, "compression": "bf16"}, {}, CPU),
        ({"recompute": "full", "activation_offload": True}, {"model": {"use": "mnist-cnn"}, **IMAGES}, CPU),
        ({"mesh": {"shard": 4}, "zero": 3}, RESNET, CPU),
        ({"precision": "fp8"}, {}, H100),
        ({"precision": "fp8", "fp8_scaling": "mx"}, {}, gpus(10, 0)),
        ({"mesh": {"shard": 16}, "ranks_per_gpu": 2}, {}, H100),
        ({"mesh": {"pipeline": 2}, "ranks_per_gpu": 2}, {}, CPU),
    ],
)
def test_what_can_be_combined_is_not_refused(plan, more, cluster):
    default_plan(recipe(plan, **more), cluster)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_no_configuration_that_is_shown_to_train_is_refused(configuration: Configuration) -> None:
    default_plan(Recipe.from_document(configuration.recipe()), CPU)


def test_an_own_loop_brings_a_model_of_which_nothing_is_known_yet():
    for mesh in ({"tensor": 2}, {"context": 2}, {"shard": 2}):
        default_plan(recipe({"mesh": mesh}, model={"use": "own"}), CPU, 2, own_loop=True)


def test_without_a_refusal_the_table_says_nothing():
    given = recipe({})
    check_supported(Case(given, Plan(micro_batch=16), facts_of(given)))


@pytest.mark.parametrize(
    ("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("zero-bubble", 1)]
)
def test_the_numbers_of_micro_batches_are_those_that_torch_accepts(pool: Pool, schedule: Any, per_rank: int) -> None:
    counts = list(range(1, 14))
    for ranks in (2, 4):
        plans = [Plan(mesh=Mesh(pipeline=ranks), pipeline_schedule=schedule, accumulate=count) for count in counts]
        expected = [plan.accumulate for plan in plans if micro_batches_fit(plan)]
        assert pool.run(ranks, accepted_by_torch, schedule, per_rank, counts) == [expected] * ranks


def test_the_styles_are_those_that_tensor_parallelism_knows():
    from gradus.parallel.tensor import REPLICATE, STYLES

    assert set(TENSOR_STYLES) == {*STYLES, REPLICATE}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--set", "plan.mesh.tensor=2", "--nproc", "2"], "plan.mesh.tensor"),
        (["--set", "plan.precision=fp8"], "plan.precision"),
    ],
)
def test_the_command_starts_nothing_and_writes_nothing(tmp_path: Path, options: list[str], field: str) -> None:
    gradus = Gradus(tmp_path)
    path = gradus.recipe("own.yaml")
    before = sorted(tmp_path.rglob("*"))
    note = tmp_path / "pid"
    done = gradus("train", path, *options, "--json", NOTE_PID=str(note), CUDA_VISIBLE_DEVICES="")
    assert done.code == 2
    assert done.json["error"]["field"] == field
    assert sorted(tmp_path.rglob("*")) == before
    assert not note.exists(), "a rank was started"
