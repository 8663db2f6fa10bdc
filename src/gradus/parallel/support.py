"""Support: what cannot be combined, in one table. No torch: it is refused before any process starts.

Each rule looks at one combination and returns the refusal, or None. What is possible as numbers go is the plan's own
check; here is what a way of splitting, a model or a device cannot do.
"""

from __future__ import annotations

from collections.abc import Callable

from gradus.parallel import split_rules
from gradus.parallel.case import Case, refused
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan

Rule = Callable[[Case], InputError | None]

GRAPHED_OPTIMIZERS = ("adamw", "sgd")  # torch's kernels of which read the learning rate on the device
LOSS_KERNEL_CAPABILITY = (8, 0)  # the oldest GPUs that Triton is made for; on others a loss in parts is slower
THIN_CHANNELS = 4  # of images, for which compiled convolutions have kernels of our own; libraries have some for eight
THIN_NUMBERS = 256  # of a window of theirs: sums for all of them are kept at once
FP8_CAPABILITY = {"tensor": (8, 9), "row": (8, 9), "block": (9, 0), "mx": (10, 0)}


def check_supported(case: Case) -> None:
    """Raise the first refusal of the table."""
    for rule in RULES.values():
        refusal = rule(case)
        if refusal is not None:
            raise refusal


# --- own loops


def _own_loop_pipeline(case: Case) -> InputError | None:
    pipeline = case.plan.mesh.pipeline
    if not case.own_loop or pipeline == 1:
        return None
    return refused(
        "plan.mesh.pipeline",
        pipeline,
        "an own loop cannot express a pipeline schedule",
        allowed=1,
        hint="train the model from a recipe (gradus train RECIPE), or use pipeline 1",
    )


# --- batch normalisation


def _batch_norm_accumulate(case: Case) -> InputError | None:
    plan = case.plan
    if not case.model.batch_norm or plan.accumulate == 1:
        return None
    return accumulated_statistics(case.model.name, plan)


def accumulated_statistics(model: str, plan: Plan) -> InputError:
    """Also for ranks, who see it in any model."""
    return refused(
        "plan.accumulate",
        plan.accumulate,
        f"{model} has batch normalisation, whose statistics are those of the whole batch",
        allowed=1,
        hint=f"use plan.micro_batch={plan.micro_batch * plan.accumulate}, more ranks, or a smaller batch",
    )


# --- expert


def _expert_model(case: Case) -> InputError | None:
    ways, experts = case.plan.mesh.expert, case.model.experts
    if ways == 1 or case.model.kind in ("user", "unknown"):
        return None
    if not experts:
        return refused(
            "plan.mesh.expert",
            ways,
            f"{case.model.name} has no experts to spread",
            allowed=1,
            hint="use plan.mesh.expert=1; gpt is a mixture with model.experts",
        )
    if experts % ways:
        return refused(
            "plan.mesh.expert",
            ways,
            f"{case.model.name} has {experts} experts, which {ways} ranks cannot share evenly",
            allowed=f"a divisor of {experts}",
            hint=f"use plan.mesh.expert={max(n for n in range(1, ways) if experts % n == 0)}",
        )
    return None


def _expert_zero(case: Case) -> InputError | None:
    plan = case.plan
    if plan.mesh.expert == 1 or plan.zero >= 1:
        return None
    return refused(
        "plan.mesh.expert",
        plan.mesh.expert,
        "zero is 0: experts are spread over ranks that share parameters",
        allowed="1, or more with plan.zero 1, 2 or 3",
        hint=f"use plan.mesh.shard={plan.mesh.expert} and plan.zero=1",
    )


def _expert_selective(case: Case) -> InputError | None:
    if case.plan.mesh.expert == 1 or case.plan.recompute != "selective":
        return None
    return refused(
        "plan.recompute",
        "selective",
        "experts that are spread over ranks gather their parameters inside a block, and selective recomputation needs "
        "a block that does exactly the same twice",
        allowed="none, full",
        hint="use plan.recompute=full, or plan.mesh.expert=1",
    )


# --- memory


def _offload_zero(case: Case) -> InputError | None:
    if case.plan.offload == "none" or case.plan.zero >= 1:
        return None
    return refused(
        "plan.offload",
        case.plan.offload,
        "zero is 0: it is the shards of parameters and optimizer state that wait in host memory",
        allowed="none, or cpu with plan.zero 1, 2 or 3",
        hint="use plan.mesh.shard=2 or more and plan.zero=3, or plan.offload=none",
    )


def _channels_last_sharded(case: Case) -> InputError | None:
    if not (case.plan.channels_last and case.plan.sharded):
        return None
    return refused(
        "plan.channels_last",
        "true",
        "FSDP2 divides only weights that lie in memory row by row",
        allowed="false",
        hint="use plan.channels_last=false, or plan.mesh.replicate in place of shard",
    )


def _loss_chunks_tensor(case: Case) -> InputError | None:
    plan = case.plan
    if plan.loss_chunks == 1 or plan.mesh.tensor == 1:
        return None
    return refused(
        "plan.loss_chunks",
        plan.loss_chunks,
        f"mesh.tensor is {plan.mesh.tensor}: each rank has the logits of its own part of the vocabulary alone",
        allowed=1,
        hint="use plan.loss_chunks=1, or plan.mesh.tensor=1",
    )


def _narrow_weights(case: Case) -> InputError | None:
    plan = case.plan
    if not plan.narrow_weights:
        return None
    if plan.precision not in ("bf16", "fp16", "fp8"):
        why = f"precision is {plan.precision}: there is nothing narrower to compute in"
        hint = "plan.precision=bf16, or plan.narrow_weights=false"
    elif plan.sharded:
        why, hint = "sharded parameters are gathered in 16 bits anyway", "plan.narrow_weights=false"
    elif plan.mesh.world_size > 1:
        why = f"the mesh has {plan.mesh.world_size} ranks, and gradients are reduced as those of the parameters"
        hint = "plan.zero=1, which does the same on several ranks"
    else:
        return None
    return refused("plan.narrow_weights", "true", why, allowed="false", hint=f"use {hint}")


def _weights_in_16_bits(case: Case) -> InputError | None:
    plan, failure = case.plan, case.model.narrow_failure
    if not failure or plan.precision not in ("bf16", "fp16", "fp8"):
        return None
    if plan.narrow_weights:
        why, hint = f"with weights in 16 bits {failure}", "use plan.narrow_weights=false"
        return refused("plan.narrow_weights", "true", why, allowed="false", hint=hint)
    if not plan.sharded:
        return None
    return refused(
        "plan.mesh",
        plan.mesh.flow(),
        f"sharded parameters are gathered in 16 bits, and with such {failure}",
        allowed="replicas or a pipeline, with zero 0",
        hint="use replicas, or plan.precision=fp32; or let the model compute in the format of its weights",
    )


# --- launching


def _cuda_graph(case: Case) -> InputError | None:
    plan, recipe = case.plan, case.recipe
    if not plan.cuda_graph:
        return None
    hint = "plan.cuda_graph=false"
    if not case.on_gpus:
        why = "there is no GPU, and a CPU launches nothing"
    elif plan.mesh.world_size > 1:
        why = f"the mesh has {plan.mesh.world_size} ranks: what they send each other is not a part of a recorded step"
    elif plan.accumulate > 1:
        why = f"accumulate is {plan.accumulate}, and a recorded step has one micro-batch"
        hint = f"plan.micro_batch={plan.micro_batch * plan.accumulate}"
    elif plan.offload != "none" or plan.activation_offload:
        why = "what is offloaded is waited for by the host"
    elif plan.precision == "fp16":
        why, hint = "loss scaling decides anew in each step", "plan.precision=bf16"
    elif recipe.optimizer.use not in GRAPHED_OPTIMIZERS:
        why = f"the optimizer is {recipe.optimizer.use}, whose learning rate would be recorded with it"
    elif recipe.optimizer.options.get("dampening"):
        why, hint = "the optimizer has dampening, which torch's kernels on the device lack", "optimizer.dampening=0"
    elif recipe.on_nan == "skip":
        why, hint = "on_nan is skip: whether a step counts is decided anew in each", "on_nan=stop"
    elif recipe.anomaly:
        why, hint = "anomaly mode looks at every number on the host", "anomaly=false"
    elif case.model.experts:
        why = f"{case.model.name} sends as many tokens to an expert as come, so that each step has other shapes"
    else:
        return None
    return refused("plan.cuda_graph", "true", why, allowed="false", hint=f"use {hint}")


# --- gradients


def _local_steps(case: Case) -> InputError | None:
    plan, mesh = case.plan, case.plan.mesh
    if plan.synchronise_every == 1 or (mesh.world_size == mesh.replicate and plan.zero == 0):
        return None
    return refused(
        "plan.synchronise_every",
        plan.synchronise_every,
        f"only whole replicas can step alone, and the mesh is {mesh}",
        allowed=1,
        hint=f"use plan.synchronise_every=1, or plan.mesh={{replicate: {mesh.world_size}}} and plan.zero=0",
    )


def _compressed_local_steps(case: Case) -> InputError | None:
    plan = case.plan
    if plan.synchronise_every == 1 or plan.compression == "none":
        return None
    return refused(
        "plan.compression",
        plan.compression,
        f"with synchronise_every {plan.synchronise_every} parameters travel, and no gradients that it could shorten",
        allowed="none",
        hint="use plan.compression=none, or plan.synchronise_every=1",
    )


def _fp16_local_steps(case: Case) -> InputError | None:
    plan = case.plan
    if plan.synchronise_every == 1 or plan.precision != "fp16":
        return None
    return refused(
        "plan.synchronise_every",
        plan.synchronise_every,
        "with fp16 each replica would skip other steps, when its own gradients overflow, and be at another step",
        allowed=1,
        hint="use plan.precision=bf16 or fp32, or plan.synchronise_every=1",
    )


def _expert_local_steps(case: Case) -> InputError | None:
    plan = case.plan
    if plan.synchronise_every == 1 or case.model.experts is None:
        return None
    return refused(
        "plan.synchronise_every",
        plan.synchronise_every,
        "the experts of replicas that step alone would be balanced apart, and never meet",
        allowed=1,
        hint="use plan.synchronise_every=1",
    )


def _compressed_sums(case: Case) -> InputError | None:
    plan = case.plan
    if plan.compression == "none" or not plan.sharded or plan.accumulate == 1:
        return None
    return refused(
        "plan.compression",
        plan.compression,
        f"FSDP2 would also add up the gradients of {plan.accumulate} micro-batches in it",
        allowed="none",
        hint="use plan.compression=none, or plan.accumulate=1",
    )


# --- precision and device


def _precision_device(case: Case) -> InputError | None:
    precision, scaling = case.plan.precision, case.plan.fp8_scaling
    if not case.on_gpus:
        lacking = {"tf32": "TF32 is a mode of NVIDIA tensor cores", "fp8": "the CPU has no FP8 matrix multiplication"}
        if precision not in lacking:
            return None
        other = "plan.precision=fp32" if precision == "tf32" else "plan.precision=bf16"
        return refused("plan.precision", precision, lacking[precision], allowed=other, hint=f"use {other}")
    least = {"bf16": (8, 0), "tf32": (8, 0), "fp8": FP8_CAPABILITY[scaling]}.get(precision)
    if least is None or case.capability is None or case.capability >= least:
        return None
    has = f"{case.gpu or 'the GPU'} has {case.capability[0]}.{case.capability[1]}"
    needs = f"needs compute capability {least[0]}.{least[1]} or newer, and {has}"
    if precision == "fp8" and case.capability >= FP8_CAPABILITY["tensor"]:
        name = "MXFP8" if scaling == "mx" else f"fp8 with a scale for each {scaling}"
        return refused(
            "plan.fp8_scaling", scaling, f"{name} {needs}", allowed="tensor", hint="use plan.fp8_scaling=tensor"
        )
    other = {"bf16": "fp16", "tf32": "fp32", "fp8": "bf16" if case.capability >= (8, 0) else "fp16"}[precision]
    return refused("plan.precision", precision, f"it {needs}", allowed=other, hint=f"use plan.precision={other}")


def _ranks_sharing_a_gpu(case: Case) -> InputError | None:
    plan = case.plan
    if plan.ranks_per_gpu == 1 or plan.mesh.pipeline == 1 or not case.on_gpus:
        return None
    return refused(
        "plan.ranks_per_gpu",
        plan.ranks_per_gpu,
        "ranks that share a GPU talk through gloo, which cannot send from one pipeline stage to the next there",
        allowed=1,
        hint="use plan.mesh.shard in place of the pipeline, or one rank for each GPU",
    )


RULES: dict[str, Rule] = {
    "own loop, pipeline": _own_loop_pipeline,
    "group_by_length, slices": split_rules.widths_of_batches,
    "tensor, no plan for the layers": split_rules.tensor_without_plan,
    "tensor does not divide": split_rules.tensor_divides,
    "tensor_plan, unknown style": split_rules.tensor_styles,
    "tensor, experts or latent attention": split_rules.tensor_mixture,
    "sequence parallel, length": split_rules.sequence_slices,
    "tensor, lora": split_rules.tensor_lora,
    "tensor, fp8": split_rules.tensor_fp8,
    "context, model": split_rules.context_model,
    "context does not divide": split_rules.context_length,
    "context, ring": split_rules.context_ring,
    "context, capacity of experts": split_rules.context_capacity,
    "context, packing": split_rules.context_packing,
    "context, mean of a loss": split_rules.context_loss,
    "pipeline, model": split_rules.pipeline_model,
    "pipeline, no loss": split_rules.pipeline_loss,
    "pipeline, balance loss": split_rules.pipeline_balance,
    "pipeline, more stages than blocks": split_rules.pipeline_stages,
    "several stages on a rank": split_rules.stages_per_rank,
    "pipeline, micro-batches": split_rules.pipeline_micro_batches,
    "zero-bubble, compile": split_rules.zero_bubble_compile,
    "zero-bubble, zero 3": split_rules.zero_bubble_zero_3,
    "zero-bubble, selective recompute": split_rules.zero_bubble_selective,
    "recompute_blocks": split_rules.recompute_blocks,
    "pipeline, fp16": split_rules.pipeline_fp16,
    "batch normalisation, accumulate": _batch_norm_accumulate,
    "expert, model": _expert_model,
    "expert, zero 0": _expert_zero,
    "expert, selective recomputation": _expert_selective,
    "offload, zero 0": _offload_zero,
    "channels_last, sharded": _channels_last_sharded,
    "loss_chunks, tensor": _loss_chunks_tensor,
    "narrow_weights": _narrow_weights,
    "weights in 16 bits": _weights_in_16_bits,
    "cuda_graph": _cuda_graph,
    "synchronise_every, not only replicas": _local_steps,
    "synchronise_every, compression": _compressed_local_steps,
    "synchronise_every, fp16": _fp16_local_steps,
    "synchronise_every, experts": _expert_local_steps,
    "compression, sharded and accumulating": _compressed_sums,
    "precision, device": _precision_device,
    "several ranks on a GPU, pipeline": _ranks_sharing_a_gpu,
}
