"""Combinations that cannot be, one case at least for each rule: of a plan with a model, a device or with itself."""

from __future__ import annotations

from refusal_cases import A100, CPU, H100, MIXTURE, RESNET, V100, Refusal, gpus

REFUSED_COMBINATIONS: list[Refusal] = [
    (
        "own loop, pipeline",
        {"mesh": {"pipeline": 2}},
        {"model": {"use": "own"}},
        CPU,
        "plan.mesh.pipeline: found 2, but an own loop cannot express a pipeline schedule",
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
        "loss_chunks, tensor",
        {"mesh": {"tensor": 2}, "loss_chunks": 4},
        {},
        CPU,
        "plan.loss_chunks: found 4, but mesh.tensor is 2: each rank has the logits of its own part of the vocabulary "
        "alone",
    ),
    (
        "narrow_weights",
        {"narrow_weights": True, "precision": "fp32"},
        {},
        CPU,
        "plan.narrow_weights: found true, but precision is fp32: there is nothing narrower to compute in",
    ),
    (
        "narrow_weights",
        {"narrow_weights": True, "precision": "bf16", "mesh": {"replicate": 2}},
        {},
        CPU,
        "plan.narrow_weights: found true, but the mesh has 2 ranks, and gradients are reduced as those of the "
        "parameters",
    ),
    (
        "narrow_weights",
        {"narrow_weights": True, "precision": "bf16", "mesh": {"shard": 2}, "zero": 2},
        {},
        CPU,
        "plan.narrow_weights: found true, but sharded parameters are gathered in 16 bits anyway",
    ),
    (
        "cuda_graph",
        {"cuda_graph": True},
        {},
        CPU,
        "plan.cuda_graph: found true, but there is no GPU, and a CPU launches nothing",
    ),
    (
        "cuda_graph",
        {"cuda_graph": True, "mesh": {"replicate": 2}},
        {},
        H100,
        "plan.cuda_graph: found true, but the mesh has 2 ranks: what they send each other is not a part of a recorded "
        "step",
    ),
    (
        "cuda_graph",
        {"mesh": {}, "cuda_graph": True, "accumulate": 2},
        {},
        H100,
        "plan.cuda_graph: found true, but accumulate is 2, and a recorded step has one micro-batch",
    ),
    (
        "cuda_graph",
        {"mesh": {}, "cuda_graph": True, "activation_offload": True},
        {},
        H100,
        "plan.cuda_graph: found true, but what is offloaded is waited for by the host",
    ),
    (
        "cuda_graph",
        {"mesh": {}, "cuda_graph": True, "precision": "fp16"},
        {},
        H100,
        "plan.cuda_graph: found true, but loss scaling decides anew in each step",
    ),
    (
        "cuda_graph",
        {"mesh": {}, "cuda_graph": True},
        {"optimizer": {"use": "lamb", "lr": 0.1}},
        H100,
        "plan.cuda_graph: found true, but the optimizer is lamb, whose learning rate would be recorded with it",
    ),
    (
        "cuda_graph",
        {"mesh": {}, "cuda_graph": True},
        {"optimizer": {"use": "sgd", "lr": 0.1, "momentum": 0.9, "dampening": 0.1}},
        H100,
        "plan.cuda_graph: found true, but the optimizer has dampening, which torch's kernels on the device lack",
    ),
    (
        "cuda_graph",
        {"mesh": {}, "cuda_graph": True},
        {"on_nan": "skip"},
        H100,
        "plan.cuda_graph: found true, but on_nan is skip: whether a step counts is decided anew in each",
    ),
    (
        "cuda_graph",
        {"mesh": {}, "cuda_graph": True},
        {"anomaly": True},
        H100,
        "plan.cuda_graph: found true, but anomaly mode looks at every number on the host",
    ),
    (
        "cuda_graph",
        {"mesh": {}, "cuda_graph": True},
        {"model": MIXTURE},
        H100,
        "plan.cuda_graph: found true, but gpt sends as many tokens to an expert as come, so that each step has other "
        "shapes",
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
