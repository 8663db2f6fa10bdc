"""Ways to divide a model that cannot be: one case at least for each rule about tensor, context and pipeline."""

from __future__ import annotations

from refusal_cases import CPU, GPT, H100, HUGGINGFACE, IMAGES, LATENT, MIXTURE, OWN, PARTS, RESNET, Refusal

from gradus.parallel.split_rules import TENSOR_STYLES

REFUSED_SPLITS: list[Refusal] = [
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
        "context, packing",
        {"mesh": {"context": 2}},
        {"data": {"use": "text", "path": "texts", "packing": True}},
        CPU,
        "plan.mesh.context: found 2, but data.packing is true: ranks that share a sequence do not keep the documents "
        "in it apart",
    ),
    (
        "group_by_length, slices",
        {"mesh": {"pipeline": 2}},
        {"data": {"use": "chat", "path": "chat", "group_by_length": 50}},
        CPU,
        "data.group_by_length: found 50, but batches are then as wide as their longest sample, and pipeline wants all "
        "of them alike",
    ),
    (
        "group_by_length, slices",
        {"mesh": {"context": 2}},
        {"data": {"use": "chat", "path": "chat", "group_by_length": 50}},
        CPU,
        "data.group_by_length: found 50, but batches are then as wide as their longest sample, and context wants all "
        "of them alike",
    ),
    (
        "context, mean of a loss",
        {"mesh": {"context": 2}},
        {"loss": "torch.nn:CrossEntropyLoss"},
        CPU,
        "plan.mesh.context: found 2, but torch.nn:CrossEntropyLoss gives a mean over a rank's part of the sequences, "
        "and parts need not have equally many valid tokens",
    ),
    (
        "context, mean of a loss",
        {"mesh": {"context": 2}},
        {**OWN, "loss": "torch.nn.functional:mse_loss"},
        CPU,
        "plan.mesh.context: found 2, but torch.nn.functional:mse_loss gives a mean over a rank's part of the "
        "sequences, and parts need not have equally many valid tokens",
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
        "recompute_blocks",
        {"recompute_blocks": 2},
        {},
        CPU,
        "plan.recompute_blocks: found 2, but recompute is none, so that no block is",
    ),
    (
        "recompute_blocks",
        {"mesh": {"pipeline": 2}, "recompute": "full", "recompute_blocks": 2},
        {},
        CPU,
        "plan.recompute_blocks: found 2, but mesh.pipeline is 2: each stage has blocks of its own, and treats all of "
        "them alike",
    ),
    (
        "pipeline, fp16",
        {"mesh": {"pipeline": 2}, "precision": "fp16"},
        {},
        CPU,
        "plan.precision: found fp16, but its loss scaling looks at all gradients of a step at once, and stages have "
        "them in turn",
    ),
]
