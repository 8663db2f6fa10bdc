"""Memory: what the fullest rank of a plan holds at the worst moment of a step, by kind. No torch.

peak = what is always there  (parameters or rows of them, master copy, optimizer state, buffers of libraries)
     + the worst moment      (activations, logits, gradients by then, gathered parameters; see moments.py)
     + micro-batches of a pipeline that wait for their backward (see in_flight.py)
     + what driver and allocator add (see device_memory.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gradus.parallel.stages import stages_of
from gradus.planner.memory.device_memory import DeviceMemory, device_memory, library_bytes
from gradus.planner.memory.framework import HERE, Framework
from gradus.planner.memory.host_memory import HostFacts, host_memory
from gradus.planner.memory.in_flight import situations
from gradus.planner.memory.model_state import ModelSize, ModelState, resting_state, whole_gradients
from gradus.planner.memory.moments import Call, Moment, Rules, Stage
from gradus.planner.memory.saved_state import share_bytes
from gradus.planner.memory.stage_calls import PassedOn, calls_of_stage, passed_on
from gradus.planner.memory.timeline import NOTHING_LIVE, Division, Live
from gradus.planner.one_pass import in_one_pass, offers_one_pass
from gradus.planner.profile.program import ModelProfile
from gradus.planner.rewritten.fused_norms import profile_with_fused_norms
from gradus.planner.rewritten.spared_blocks import with_spared_blocks
from gradus.planner.staging import staged_calls
from gradus.planner.zero import number_bytes
from gradus.schema.plan import Plan
from gradus.schema.prediction import HostMemoryPrediction, MemoryPrediction, Verdict
from gradus.schema.recipe import OptimizerBlock, Recipe

# The stated relative errors, by what a prediction rests on. Of 43 models and plans on an H200 (benchmarks/measured),
# half came out within 0.2 % of the tensors that they had, and 41 within 2 %; the other two were convolutions in fp32,
# for which cuDNN may choose what needs most workspace: the share of workspace at the peak is added. Of 9 compiled ones,
# all were within 4 %.
EAGER_ERROR, COMPILED_ERROR, FALLBACK_ERROR = 0.04, 0.06, 0.50

# Elements that an optimizer keeps for each trained one, and makes for a moment at its step. Fused kernels make none;
# torch's Adadelta makes two (torch/optim/adadelta.py, _multi_tensor_adadelta), an own one is taken for torch's unfused
# Adam, which makes one (torch/optim/adam.py, _multi_tensor_adam).
OPTIMIZERS: dict[str, tuple[float, float]] = {
    "adamw": (2, 0),
    "sgd": (0, 0),
    "adadelta": (2, 2),
    "lamb": (2, 0),
    "lars": (1, 0),
}
OWN_OPTIMIZER = (2.0, 1.0)
BATCHES_ON_DEVICE = 2  # as loaded: one in use, and one that is copied meanwhile (data/loader.py)


@dataclass(frozen=True)
class MemoryFacts:
    """What neither the profile nor the plan says."""

    optimizer_tensors: float = 2
    optimizer_temporaries: float = 0
    ema: bool = False  # an average of the weights is kept beside them
    lora: bool = False  # adapters: what is not trained is in no checkpoint
    saves_in_background: bool = True  # from a copy of the state in host memory
    updates_in_one_pass: bool = False  # the optimizer takes gradients of narrow weights as they are; see one_pass.py
    resident_data_bytes: int = 0  # of a dataset that is kept on the device
    device: DeviceMemory = field(default_factory=DeviceMemory)
    host: HostFacts = field(default_factory=HostFacts)
    framework: Framework = HERE


def memory_facts(
    recipe: Recipe, capability: tuple[int, int] | None = None, host: HostFacts | None = None
) -> MemoryFacts:
    """The facts of a recipe on GPUs of this compute capability."""
    tensors, temporaries = optimizer_tensors(recipe.optimizer)
    return MemoryFacts(
        optimizer_tensors=tensors,
        optimizer_temporaries=temporaries,
        ema=any(hook.use == "ema" for hook in recipe.hooks),
        lora=recipe.lora is not None,
        saves_in_background=recipe.checkpoint.background,
        updates_in_one_pass=offers_one_pass(recipe),
        device=device_memory(capability),
        host=host or HostFacts(),
    )


def optimizer_tensors(block: OptimizerBlock) -> tuple[float, float]:
    """Elements of optimizer state for each trained parameter, and those that a step makes for a moment."""
    kept, made = OPTIMIZERS.get(block.use, OWN_OPTIMIZER)
    if block.use == "adamw" and block.options.get("amsgrad"):
        kept += 1
    if block.moments == "bf16":  # counted as elements of 32 bits
        kept /= 2
    if block.use == "sgd" and block.options.get("momentum"):
        kept += 1
    return kept, made


@dataclass(frozen=True)
class RankMemory:
    """The rank that needs most."""

    memory: MemoryPrediction
    peak_at: str  # "backward of block 3", "optimizer step", "loss"
    host: HostMemoryPrediction  # of a node
    error: float  # relative, of the peak
    stage: int = 0  # of the pipeline rank
    saved_bytes: int = 0  # of a checkpoint: what this rank copies and writes


def verdict(memory: MemoryPrediction, limit_bytes: int | None, error: float) -> Verdict:
    """`fits` and `no` only where the stated error leaves no doubt."""
    if limit_bytes is None or memory.peak * (1 + error) <= limit_bytes:
        return "fits"
    return "no" if memory.peak * (1 - error) > limit_bytes else "tight"


def limit_bytes(plan: Plan, device_bytes: int | None, context_bytes: int) -> int | None:
    """What a rank may use of a device with so much memory; see `under_a_cap` for what is counted."""
    if plan.memory_limit_gib is not None and under_a_cap(plan, device_bytes, context_bytes):
        return round(plan.memory_limit_gib * 2**30)
    return _share(plan, device_bytes)


def under_a_cap(plan: Plan, device_bytes: int | None, context_bytes: int) -> bool:
    """Whether what binds is plan.memory_limit_gib, a limit on torch's allocator: the driver's share is not under it.

    That is on the device all the same, and no limit of a plan makes a device larger.
    """
    share = _share(plan, device_bytes)
    if plan.memory_limit_gib is None:
        return False
    return share is None or round(plan.memory_limit_gib * 2**30) + context_bytes <= share


def _share(plan: Plan, device_bytes: int | None) -> int | None:
    return device_bytes // plan.ranks_per_gpu if device_bytes is not None else None


def predicted_memory(profile: ModelProfile, plan: Plan, facts: MemoryFacts) -> RankMemory:
    """What the fullest rank holds. The profile was traced in the plan's precision, and with narrow parameters if the
    plan shards them."""
    if facts.framework.fused_norms:
        profile = profile_with_fused_norms(profile)
    profile = with_spared_blocks(profile, plan)
    division = _division(plan)
    staged = staged_calls(profile, plan)
    ways = plan.mesh.pipeline
    seen: set[tuple[object, ...]] = set()
    worst: RankMemory | None = None
    for rank in range(ways):
        here = stages_of(rank, ways, plan.stages_per_rank)
        # Of ranks with like blocks, the first has most micro-batches in flight.
        kind = (*(tuple(staged[stage]) for stage in here), rank == 0, rank == ways - 1)
        if kind in seen:
            continue
        seen.add(kind)
        found = _rank_memory(profile, plan, facts, division, staged, here, rank)
        if worst is None or found.memory.peak > worst.memory.peak:
            worst = found
    assert worst is not None
    return worst


def least_bytes(profile: ModelProfile, plan: Plan, facts: MemoryFacts) -> int:
    """What a rank certainly needs, said quickly: its even share of the model's state."""
    mesh = plan.mesh
    ways = mesh.tensor * mesh.pipeline * (1 if plan.sharded else mesh.expert)
    size = ModelSize(profile.parameters // ways, profile.trained // ways, optimizer_tensors=facts.optimizer_tensors)
    state = resting_state(size, plan)
    return state.parameters + state.master + state.optimizer


def _division(plan: Plan) -> Division:
    mesh = plan.mesh
    return Division(
        plan.micro_batch,
        mesh.tensor,
        sequence=plan.sequence_parallel and mesh.tensor > 1,
        context=mesh.context,
        expert=mesh.expert,
    )


def _rank_memory(
    profile: ModelProfile,
    plan: Plan,
    facts: MemoryFacts,
    division: Division,
    staged: Sequence[Sequence[int]],
    here: Sequence[int],
    rank: int,
) -> RankMemory:
    calls = [calls_of_stage(profile, plan, facts.framework, division, staged, stage) for stage in here]
    size = _size(profile, plan, facts, division, calls, rank)
    state = _state(size, plan, facts)
    rules = _rules(profile, plan, facts.framework)
    rules = replace(
        rules,
        gradients=_gradients_from_the_start(rules, plan, state, sum(call.trained for stage in calls for call in stage)),
        tied=_tied_bytes(profile, plan) if plan.mesh.pipeline == 1 else 0,
    )
    stages = [Stage(of_stage, rules) for of_stage in calls]
    passed = [passed_on(profile, division, staged, stage) for stage in here]
    moment, waiting = (
        _worst_in_pipeline(stages, passed, plan, facts.framework, rank) if plan.mesh.pipeline > 1 else _worst(stages)
    )
    stepping = Moment(
        "optimizer step",
        Live(gradients=state.gradients),
        communication=round(number_bytes(plan.precision)[1] * facts.optimizer_temporaries * size.trained)
        // (plan.mesh.shards if plan.sharded and plan.zero else 1),
    )
    one_pass = in_one_pass(plan, offered=facts.updates_in_one_pass)
    if plan.narrow_weights and not plan.sharded and not one_pass:  # new ones are beside those that are handed over
        narrow = number_bytes(plan.precision)[0]
        handed = Live(gradients=state.gradients + narrow * size.trained)
        stepping = max(stepping, Moment("widening gradients", handed), key=lambda each: each.total)
    if stepping.total > moment.total + waiting.total:
        moment, waiting = stepping, NOTHING_LIVE
    live = moment.live.plus(waiting)
    inputs = _input_bytes(profile, plan, division) + facts.resident_data_bytes
    buffers = _buffer_bytes(plan, facts.framework, passed)
    comes_and_goes = live.total - live.gradients + moment.gathered + moment.communication
    memory = MemoryPrediction(
        parameters=state.parameters + moment.gathered + live.copies,
        master=state.master,
        gradients=live.gradients,
        optimizer=state.optimizer,
        activations=live.activations + live.workspace + inputs + facts.device.workspace_bytes,
        logits=live.logits,
        communication=moment.communication + buffers + (library_bytes(plan) if facts.device.uses_nccl else 0),
        device_context=facts.device.context_bytes,
        fragmentation=round(facts.device.fragmentation * comes_and_goes),
    )
    on_host = sum(call.on_host for stage in stages for call in stage.calls)
    saved = share_bytes(size, plan, averaged=facts.ema, adapters=facts.lora)
    copied = saved if facts.saves_in_background else 0
    return RankMemory(
        memory,
        moment.where,
        host_memory(size, plan, facts.host, kept_bytes=on_host, sample_bytes=profile.sample_bytes, saved_bytes=copied),
        error_of(profile, plan) + round(live.workspace / memory.peak, 3),
        rank,
        saved,
    )


def error_of(profile: ModelProfile, plan: Plan) -> float:
    """The stated relative error of a prediction from this profile, of what is no estimated workspace."""
    if not profile.traced:
        return FALLBACK_ERROR
    return COMPILED_ERROR if plan.compile else EAGER_ERROR


# --- what is always there


def _size(
    profile: ModelProfile,
    plan: Plan,
    facts: MemoryFacts,
    division: Division,
    calls: Sequence[Sequence[Call]],
    rank: int,
) -> ModelSize:
    parameters = sum(call.shared_parameters for stage in calls for call in stage)
    trained = sum(call.shared_trained for stage in calls for call in stage)
    if 0 < rank == plan.mesh.pipeline - 1:  # an embedding that is the output layer too: both ends have it
        parameters += profile.tied_elements // division.tensor
        trained += profile.tied_trained // division.tensor
    return ModelSize(parameters, trained, optimizer_tensors=facts.optimizer_tensors)


def _state(size: ModelSize, plan: Plan, facts: MemoryFacts) -> ModelState:
    state = resting_state(size, plan)
    narrow, wide = number_bytes(plan.precision)
    narrowed = plan.narrow_weights or facts.framework.narrow_parameters
    if narrowed and not plan.sharded and narrow < wide:
        state = replace(state, parameters=narrow * size.parameters, master=wide * size.parameters)
    if in_one_pass(plan, offered=facts.updates_in_one_pass):
        state = replace(state, gradients=narrow * size.trained)
    if facts.ema and not (plan.sharded and plan.offload == "cpu"):
        ranks = plan.mesh.shards if plan.sharded and plan.zero else 1
        state = replace(state, optimizer=state.optimizer + wide * size.trained // ranks)
    return state


def _rules(profile: ModelProfile, plan: Plan, framework: Framework) -> Rules:
    mesh = plan.mesh
    narrow, wide = number_bytes(plan.precision)
    if not plan.sharded:
        averaged = mesh.replicate * mesh.shard * mesh.context > 1 and mesh.pipeline == 1
        buckets = averaged and plan.synchronise_every == 1  # DDP's, of which gradients are views
        return Rules(adding=buckets or plan.accumulate > 1 or framework.gradient_buffers, piling_up=plan.narrow_weights)
    stays = mesh.pipeline > 1 or plan.accumulate > 1
    return Rules(
        adding=plan.accumulate > 1,
        sharded=True,
        gathering="one block" if plan.zero == 3 and mesh.pipeline == 1 else "all" if stays else "so far",
        narrow=narrow,
        gradient_share=1.0 if profile.narrow_parameters or narrow == wide else narrow / wide,
        reduced=2 if plan.compression == "bf16" else wide,
        row=0.0 if plan.offload == "cpu" else wide / (mesh.shards if plan.zero else 1),
        pile_rows=plan.accumulate == 1,
        reducing="at the end" if mesh.pipeline > 1 else "last" if whole_gradients(plan) else "each",
        wide=wide,
        lingers=plan.accumulate > 1 and not whole_gradients(plan),
    )


def _gradients_from_the_start(rules: Rules, plan: Plan, state: ModelState, trained: int) -> int:
    if not rules.adding:
        return 0
    if plan.sharded and whole_gradients(plan):
        return number_bytes(plan.precision)[1] * trained
    return state.gradients


def _tied_bytes(profile: ModelProfile, plan: Plan) -> int:
    narrow, wide = number_bytes(plan.precision)
    return (narrow if plan.sharded or plan.narrow_weights else wide) * profile.tied_trained // plan.mesh.tensor


def _input_bytes(profile: ModelProfile, plan: Plan, division: Division) -> int:
    """Micro-batches as they were loaded, and as the model gets them: ranks of a pipeline have those of a whole step."""
    in_use = plan.accumulate if plan.mesh.pipeline > 1 else 1
    batches = BATCHES_ON_DEVICE if profile.input_bytes else in_use + 1
    samples = batches * profile.sample_bytes + in_use * profile.input_bytes
    return round(samples * plan.micro_batch / division.context)


def _buffer_bytes(plan: Plan, framework: Framework, passed: Sequence[PassedOn]) -> int:
    """Of communication, in any case: what stages receive, forward and back, and buckets that are no gradients."""
    mesh = plan.mesh
    total = sum(one.total for one in passed) * (plan.accumulate if framework.torch_pipelines else 1)
    averaged_apart = not plan.sharded and mesh.replicate > 1 and (mesh.pipeline > 1 or plan.synchronise_every > 1)
    if averaged_apart:
        total += 3 * plan.bucket_mib * 2**20  # what is sent, its mean, and that in the format of the gradients
    elif plan.compression == "bf16" and not plan.sharded and mesh.replicate > 1:
        total += plan.bucket_mib * 2**20
    return total


# --- what comes and goes


def _worst(stages: Sequence[Stage]) -> tuple[Moment, Live]:
    """The worst moment of a step without a pipeline."""
    (stage,) = stages
    moments = [stage.forward, stage.backward, *([stage.end] if stage.end else [])]
    return max(moments, key=lambda moment: moment.total), NOTHING_LIVE


def _worst_in_pipeline(
    stages: Sequence[Stage], passed: Sequence[PassedOn], plan: Plan, framework: Framework, rank: int
) -> tuple[Moment, Live]:
    """The worst moment of a step, and what other micro-batches hold then."""
    found = [(stage.end, NOTHING_LIVE) for stage in stages if stage.end is not None]
    # Before any micro-batch is through its backward, there are no gradients yet.
    first = stages
    if not framework.gradient_buffers:
        first = [Stage(stage.calls, replace(stage.rules, adding=False, gradients=0)) for stage in stages]
    sends_linger = framework.torch_pipelines and plan.pipeline_schedule in ("interleaved", "zero-bubble")
    ways, micro_batches = plan.mesh.pipeline, plan.accumulate
    for situation in situations(plan.pipeline_schedule, rank, ways, plan.stages_per_rank, micro_batches):
        stage = (stages if situation.after_backward else first)[situation.stage]
        moment = stage.forward if situation.phase == "forward" else stage.backward
        waiting = NOTHING_LIVE
        for number, (one, count) in enumerate(zip(stages, situation.others, strict=True)):
            waiting = waiting.plus(one.kept, count)
            if sends_linger:
                done = micro_batches - count - (number == situation.stage)
                moment = replace(moment, communication=moment.communication + done * passed[number].total)
        found.append((moment, waiting))
    return max(found, key=lambda one: one[0].total + one[1].total)
