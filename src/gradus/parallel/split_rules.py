"""Split rules: which models, lengths and schedules tensor, context and pipeline cannot take. No torch."""

from __future__ import annotations

from gradus.parallel.case import Case, refused
from gradus.parallel.stages import check_enough_blocks
from gradus.schema.errors import InputError, unknown_name
from gradus.schema.plan import Plan

TRANSFORMERS = ("gpt", "bert", "vit")
SPLIT_SEQUENCES = ("gpt", "bert")
WIDEST_HEAD = 256  # of the CUDA kernel that the ring uses
SEVERAL_STAGES = ("interleaved", "zero-bubble")
TENSOR_STYLES = (  # what a recipe's tensor_plan may say of a layer
    *("colwise", "colwise_gather", "rowwise", "rowwise_split", "rowwise_scatter"),
    *("gather", "sequence", "shared", "replicate"),
)


def micro_batches_fit(plan: Plan) -> bool:
    """Whether the schedule can run with this many micro-batches."""
    stages, count = plan.mesh.pipeline, plan.accumulate
    if stages == 1 or plan.pipeline_schedule == "gpipe":
        return True
    if plan.pipeline_schedule == "1f1b":
        return count >= stages
    # torch deals them out in rounds of equal size, as many as there are stages or a few more.
    return count % max(1, count // stages) == 0


# --- sequences of many lengths


def widths_of_batches(case: Case) -> InputError | None:
    plan, window = case.plan, case.recipe.data.group_by_length
    sliced = {
        "pipeline": plan.mesh.pipeline > 1,  # stages send each other tensors whose sizes they know beforehand
        "context": plan.mesh.context > 1,
        "tensor (with sequence_parallel)": plan.mesh.tensor > 1 and plan.sequence_parallel,
    }
    split = next((name for name, found in sliced.items() if found), None)
    if window is None or split is None:
        return None
    return refused(
        "data.group_by_length",
        window,
        f"batches are then as wide as their longest sample, and {split} wants all of them alike",
        allowed="nothing",
        hint="use plan.mesh.shard or plan.mesh.replicate, or leave data.group_by_length out",
    )


# --- tensor


def tensor_without_plan(case: Case) -> InputError | None:
    tensor, model = case.plan.mesh.tensor, case.model
    if tensor == 1 or case.recipe.tensor_plan or model.reference in TRANSFORMERS:
        return None
    if model.kind in ("huggingface", "unknown"):  # which may carry a plan of its own
        return None
    if model.kind == "reference":
        return refused(
            "plan.mesh.tensor",
            tensor,
            f"the layers of {model.name} are not split by tensor",
            allowed=1,
            hint="use plan.mesh.shard or plan.mesh.replicate",
        )
    return refused(
        "plan.mesh.tensor",
        tensor,
        f"nothing says how the layers of {model.name} are split",
        allowed=1,
        hint='name them in the recipe, tensor_plan: {"layers.*.q": colwise, "layers.*.out": rowwise}, or use shard',
    )


def tensor_divides(case: Case) -> InputError | None:
    tensor, model = case.plan.mesh.tensor, case.model
    for number, what in (
        (model.heads, "heads"),
        (model.kv_heads, "key-value heads"),
        (model.inner, "numbers inside its MLP"),
    ):
        if number is not None and number % tensor:
            most = max(ways for ways in range(1, tensor) if number % ways == 0)
            return refused(
                "plan.mesh.tensor",
                tensor,
                f"{model.name} has {number} {what}, which {tensor} ranks cannot share evenly",
                allowed=f"a divisor of {number}",
                hint=f"use plan.mesh.tensor={most}",
            )
    return None


def tensor_styles(case: Case) -> InputError | None:
    for pattern, style in case.recipe.tensor_plan.items():
        if style not in TENSOR_STYLES:
            return unknown_name(f"style of {pattern!r}:", style, TENSOR_STYLES, field="tensor_plan")
    return None


def tensor_mixture(case: Case) -> InputError | None:
    tensor, model = case.plan.mesh.tensor, case.model
    if tensor == 1 or not (model.experts or model.latent_attention) or case.recipe.tensor_plan:
        return None
    what = "experts" if model.experts else "latent attention"
    return refused(
        "plan.mesh.tensor",
        tensor,
        f"the {what} of {model.name} {'are' if model.experts else 'is'} not split by tensor",
        allowed=1,
        hint=f"use plan.mesh.shard{' and plan.mesh.expert' if model.experts else ''}",
    )


def sequence_slices(case: Case) -> InputError | None:
    plan, model = case.plan, case.model
    slices = plan.mesh.tensor * plan.mesh.context
    if plan.mesh.tensor == 1 or not plan.sequence_parallel or model.reference not in SPLIT_SEQUENCES:
        return None
    if model.longest is None or model.sequence is None or model.sequence % slices == 0:
        return None
    if model.longest % slices:  # then the model does without slices
        return None
    below, above = model.sequence - model.sequence % slices, model.sequence + slices - model.sequence % slices
    return refused(
        "plan.sequence_parallel",
        "true",
        f"sequences of {model.sequence} tokens cannot be cut into {slices} slices (tensor × context)",
        allowed="false",
        hint=f"use plan.sequence_parallel=false, or data.context={below or above} or {above}",
    )


def tensor_lora(case: Case) -> InputError | None:
    if case.plan.mesh.tensor == 1 or case.recipe.lora is None:
        return None
    return refused(
        "plan.mesh.tensor",
        case.plan.mesh.tensor,
        "the small matrices of lora are not split by tensor",
        allowed=1,
        hint="use plan.mesh.shard: with lora only the small matrices have gradients and optimizer state",
    )


def tensor_fp8(case: Case) -> InputError | None:
    if case.plan.mesh.tensor == 1 or case.plan.precision != "fp8":
        return None
    return refused(
        "plan.mesh.tensor",
        case.plan.mesh.tensor,
        "products in 8 bits are not divided over ranks: their scales are of whole matrices",
        allowed=1,
        hint="use plan.mesh.shard with fp8, or plan.precision=bf16 with tensor",
    )


# --- context


def context_model(case: Case) -> InputError | None:
    context, model = case.plan.mesh.context, case.model
    if context == 1 or model.kind in ("user", "unknown") or model.reference in SPLIT_SEQUENCES:
        return None  # whether attention of a user's can be replaced is seen when it is there
    return refused(
        "plan.mesh.context",
        context,
        f"{model.name} does not take a part of a sequence",
        allowed=1,
        hint=f"{' and '.join(SPLIT_SEQUENCES)} do; for other models use plan.mesh.shard or plan.recompute",
    )


def context_length(case: Case) -> InputError | None:
    context, length = case.plan.mesh.context, case.model.sequence
    pieces = 2 * context  # each rank takes one from the front and one from the back: all have as much to do
    if context == 1 or length is None or length % pieces == 0:
        return None
    below, above = length - length % pieces, length + pieces - length % pieces
    return refused(
        "plan.mesh.context",
        context,
        f"sequences of {length} tokens cannot be cut into {pieces} pieces, two for each rank",
        allowed=f"a divisor of {length} / 2",
        hint=f"use data.context={below or above} or {above}",
    )


def context_ring(case: Case) -> InputError | None:
    plan = case.plan
    if plan.mesh.context == 1 or plan.context_attention != "ring":
        return None
    if case.model.dropout:
        why = f"the ring cannot repeat in backward what dropout ({case.model.dropout:g}) left out"
    elif len(set(case.model.head_widths)) > 1:
        keys, values = case.model.head_widths
        why = f"its kernel needs values as wide as keys, and a head of {case.model.name} has {values} and {keys}"
    elif case.on_gpus and any(width % 8 or width > WIDEST_HEAD for width in case.model.head_widths):
        why = f"its kernel takes heads of 8, 16 to {WIDEST_HEAD} numbers, and they have {case.model.head_widths[0]}"
    elif case.on_gpus and plan.precision not in ("bf16", "fp16", "fp8"):
        why = f"its kernel computes in bf16 and fp16, and plan.precision is {plan.precision}"
    else:
        return None
    return refused(
        "plan.context_attention", "ring", why, allowed="gather, auto", hint="use plan.context_attention=gather"
    )


def context_capacity(case: Case) -> InputError | None:
    if case.plan.mesh.context == 1 or case.model.capacity is None:
        return None
    return refused(
        "plan.mesh.context",
        case.plan.mesh.context,
        f"an expert of {case.model.name} takes a share of each sequence (capacity_factor {case.model.capacity:g}), "
        "and no rank sees a whole one",
        allowed=1,
        hint="leave out model.capacity_factor: no token is dropped then",
    )


def context_packing(case: Case) -> InputError | None:
    if case.plan.mesh.context == 1 or not case.recipe.data.packs:
        return None
    return refused(
        "plan.mesh.context",
        case.plan.mesh.context,
        "data.packing is true: ranks that share a sequence do not keep the documents in it apart",
        allowed=1,
        hint="use plan.mesh.shard or plan.mesh.tensor in place of context, or data.packing=false",
    )


def context_loss(case: Case) -> InputError | None:
    context, loss = case.plan.mesh.context, case.recipe.loss
    if context == 1 or loss is None or not loss.use.startswith(("torch.nn:", "torch.nn.")):
        return None  # what a user's own returns is seen at the first step
    return refused(
        "plan.mesh.context",
        context,
        f"{loss.use} gives a mean over a rank's part of the sequences, and parts need not have equally many valid "
        "tokens",
        allowed=1,
        hint="use loss: cross-entropy or mse, or a function of your own that returns (sum, count)",
    )


# --- pipeline


def pipeline_model(case: Case) -> InputError | None:
    pipeline, model = case.plan.mesh.pipeline, case.model
    if pipeline == 1 or model.reference in TRANSFORMERS or case.recipe.pipeline_parts is not None:
        return None
    if model.kind == "reference":
        return refused(
            "plan.mesh.pipeline",
            pipeline,
            f"{model.name} is no list of equal blocks that could be cut into stages",
            allowed=1,
            hint="use plan.mesh.shard or plan.mesh.replicate",
        )
    return refused(
        "plan.mesh.pipeline",
        pipeline,
        f"nothing says where {model.name} may be cut into stages",
        allowed=1,
        hint="name its parts in the recipe, pipeline_parts: {head: embedding, blocks: layers, tail: output}",
    )


def pipeline_loss(case: Case) -> InputError | None:
    if case.plan.mesh.pipeline == 1 or case.model.kind == "reference" or case.recipe.loss is not None:
        return None
    return refused(
        "plan.mesh.pipeline",
        case.plan.mesh.pipeline,
        f"the last stage of {case.model.name} needs a loss of its own: the model's forward is not called",
        allowed=1,
        hint="name one in the recipe, loss: cross-entropy or file.py:name",
    )


def pipeline_balance(case: Case) -> InputError | None:
    if case.plan.mesh.pipeline == 1 or case.model.balance != "loss":
        return None
    return refused(
        "plan.mesh.pipeline",
        case.plan.mesh.pipeline,
        f"the balance loss of {case.model.name} is added in its forward, which stages do not call",
        allowed=1,
        hint="use model.balance=bias, or plan.mesh.shard in place of the pipeline",
    )


def pipeline_stages(case: Case) -> InputError | None:
    plan, blocks = case.plan, case.model.blocks
    if blocks is None or (plan.mesh.pipeline == 1 and plan.stage_blocks is None):
        return None
    try:
        check_enough_blocks(blocks, plan.mesh.pipeline, plan.stages_per_rank, plan.stage_blocks)
    except InputError as refusal:
        return refusal
    return None


def stages_per_rank(case: Case) -> InputError | None:
    plan = case.plan
    if plan.stages_per_rank == 1 or (plan.mesh.pipeline > 1 and plan.pipeline_schedule in SEVERAL_STAGES):
        return None
    one_stage = "there is no pipeline" if plan.mesh.pipeline == 1 else f"{plan.pipeline_schedule} has one on each rank"
    return refused(
        "plan.stages_per_rank",
        plan.stages_per_rank,
        one_stage,
        allowed=1,
        hint=f"use plan.stages_per_rank=1, or plan.pipeline_schedule={' or '.join(SEVERAL_STAGES)} with a pipeline",
    )


def pipeline_micro_batches(case: Case) -> InputError | None:
    plan = case.plan
    if micro_batches_fit(plan):
        return None
    stages, share = plan.mesh.pipeline, plan.micro_batch * plan.accumulate
    counts = [n for n in range(1, share + 1) if share % n == 0]
    fitting = [n for n in counts if micro_batches_fit(plan.model_copy(update={"accumulate": n})) and n >= stages]
    needs = f"at least {stages} micro-batches"
    if plan.pipeline_schedule != "1f1b":
        needs = f"micro-batches in {plan.accumulate // stages} rounds of equal size"
    hint = f"use a batch of which each data rank gets a multiple of {stages} samples, or plan.pipeline_schedule=gpipe"
    if fitting:
        count = min(fitting, key=lambda n: (abs(n - plan.accumulate), n))
        hint = f"use plan.accumulate={count} and plan.micro_batch={share // count}"
    return refused(
        "plan.accumulate",
        plan.accumulate,
        f"{plan.pipeline_schedule} over {stages} stages needs {needs}",
        allowed=f"at least {stages}" if plan.pipeline_schedule == "1f1b" else f"a multiple of {stages}",
        hint=hint,
    )


def zero_bubble_compile(case: Case) -> InputError | None:
    plan = case.plan
    if plan.mesh.pipeline == 1 or plan.pipeline_schedule != "zero-bubble" or not plan.compile:
        return None
    return refused(
        "plan.compile",
        "true",
        "zero-bubble takes backward apart, which torch cannot do with compiled stages",
        allowed="false",
        hint="use plan.compile=false, or plan.pipeline_schedule=1f1b or interleaved",
    )


def zero_bubble_selective(case: Case) -> InputError | None:
    plan = case.plan
    if plan.mesh.pipeline == 1 or plan.pipeline_schedule != "zero-bubble" or plan.recompute != "selective":
        return None
    return refused(
        "plan.recompute",
        "selective",
        "zero-bubble takes backward apart, and what selective keeps can be used only once",
        allowed="none, full",
        hint="use plan.recompute=full or none, or plan.pipeline_schedule=1f1b or interleaved",
    )


def recompute_blocks(case: Case) -> InputError | None:
    plan = case.plan
    if plan.recompute_blocks is None or (plan.recompute != "none" and plan.mesh.pipeline == 1):
        return more_than_its_blocks(plan, case.model.name, case.model.blocks) if case.model.blocks else None
    if plan.recompute == "none":
        why, hint = "recompute is none, so that no block is", "use plan.recompute=selective or full"
    else:
        why = f"mesh.pipeline is {plan.mesh.pipeline}: each stage has blocks of its own, and treats all of them alike"
        hint = "use plan.recompute_blocks=null, which means all"
    return refused("plan.recompute_blocks", plan.recompute_blocks, why, allowed="null", hint=hint)


def more_than_its_blocks(plan: Plan, name: str, blocks: int) -> InputError | None:
    """Of models that no rule knows, whoever has built or traced one asks; without blocks, it is treated as one."""
    asked = plan.recompute_blocks
    if asked is None or asked <= max(1, blocks):
        return None
    has = (
        f"{name} has {blocks} block{'s' if blocks > 1 else ''}"
        if blocks
        else f"{name} has no repeated blocks: it is one"
    )
    return refused(
        "plan.recompute_blocks",
        asked,
        has,
        allowed=f"1 to {max(1, blocks)}, or null for all",
        hint="use plan.recompute_blocks=null, which means all",
    )


def zero_bubble_zero_3(case: Case) -> InputError | None:
    plan = case.plan
    if plan.mesh.pipeline == 1 or plan.pipeline_schedule != "zero-bubble" or plan.zero != 3:
        return None
    return refused(
        "plan.zero",
        3,
        "zero-bubble needs whole parameters between the two halves of backward, and zero 3 lets go of them",
        allowed="0, 1, 2",
        hint="use plan.zero=2, or plan.pipeline_schedule=1f1b or interleaved",
    )


def pipeline_fp16(case: Case) -> InputError | None:
    if case.plan.mesh.pipeline == 1 or case.plan.precision != "fp16":
        return None
    return refused(
        "plan.precision",
        "fp16",
        "its loss scaling looks at all gradients of a step at once, and stages have them in turn",
        allowed="bf16, fp32, tf32, fp8, fp64",
        hint="use plan.precision=bf16, or plan.mesh.shard in place of the pipeline",
    )
