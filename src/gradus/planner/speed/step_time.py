"""Step time: how long an optimizer step takes, by kind. No torch.

On one rank, a step is its micro-batches through its parts, forward and backward, what its groups exchange in between,
and the optimizer. The device works off what the host launches; nothing in a step makes the host wait, so that the
slower of the two sets the pace (in eager mode and with small tensors, the host).

In a pipeline, the slowest rank sets the pace. What the others wait for it, and what all wait while a pipeline fills and
drains, is the bubble.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gradus.parallel.stages import bubble, stages_of
from gradus.planner.one_pass import in_one_pass, offers_one_pass
from gradus.planner.profile.program import ModelProfile, Part
from gradus.planner.rewritten.as_planned import as_planned
from gradus.planner.rewritten.spared_blocks import with_spared_blocks
from gradus.planner.speed.compute import Setting
from gradus.planner.speed.device import Device
from gradus.planner.speed.network import Fabric, fabric_of, group_of, send
from gradus.planner.speed.part_time import (
    Exchange,
    Groups,
    PartTime,
    context_exchange,
    expert_exchange,
    part_time,
    tensor_exchange,
)
from gradus.planner.speed.sharding_time import (
    Elements,
    Sharding,
    Stretch,
    copying_seconds,
    elements_of,
    replicas_exchange,
    shards_exchange,
)
from gradus.planner.staging import staged_calls
from gradus.schema.cluster import Cluster
from gradus.schema.plan import Plan
from gradus.schema.prediction import StepPrediction
from gradus.schema.recipe import Recipe

# Bytes that an optimizer reads and writes for each trained element in fp32: parameter, gradient and state, the
# gradient only read. Those of adamw and sgd are fused and go over them once. Adadelta: what its time on an H200 comes
# to (benchmarks/gpu_speeds.py). Lamb and lars: passes over them, counted in training/layerwise.py.
OPTIMIZER_BYTES = {"adamw": 28.0, "sgd": 20.0, "adadelta": 105.0, "lamb": 124.0, "lars": 64.0}
OWN_OPTIMIZER_BYTES = 28.0
# Kernels that an optimizer launches for each tensor by itself, where it does not take them all together.
OPTIMIZER_KERNELS = {"lamb": 20, "lars": 12}
NORM_BYTES, SCALE_BYTES, ADD_BYTES = 4.0, 8.0, 12.0  # of a gradient: read; read and written; and another one read
# Of a weight, read in fp32 and written in 16 bits; of its gradient, the other way round, for each micro-batch.
ROUNDING_BYTES, WIDENING_BYTES = 6.0, 6.0
# AdamW with narrow weights in one pass: a gradient of 16 bits is read, weight and moments are read and written, and the
# weight is written in 16 bits as well. Clipping scales on the way, and its norm reads the narrow gradient.
ONE_PASS_BYTES, NARROW_NORM_BYTES = 28.0, 2.0
# With moments in bf16: in one pass, both are read and written in half of the bytes; otherwise by one operator after
# another, counted in training/narrow_moments.py.
ONE_PASS_NARROW_MOMENTS_BYTES, NARROW_MOMENTS_BYTES, NARROW_MOMENTS_KERNELS = 20.0, 490.0, 60
# That the host needs for a step that is recorded: three launches, copies of a batch and of learning rates, and reading
# numbers back. Measured as an order of magnitude: a tiny GPT took 0.56 ms a step on an H200, device included.
GRAPHS_SECONDS = 0.15e-3
# Where parameters and optimizer state wait on the host, its memory is what an update runs at. Assumed: a rank's share
# of a server's memory bandwidth (some 200 GB/s for two sockets, eight ranks).
HOST_MEMORY_BYTES_PER_SECOND = 25e9


@dataclass(frozen=True)
class StepFacts:
    """What is neither in the profile nor in the plan."""

    optimizer: str = "adamw"
    momentum: bool = True  # of sgd
    clip: bool = False
    data_seconds: float = 0.0  # that a step waits for its samples; unknown counts as none
    updates_in_one_pass: bool = False  # of narrow weights, where the plan lets it; see one_pass.py
    hooks: bool = False  # which may write weights between steps
    narrow_moments: bool = False  # of adamw

    @classmethod
    def of(cls, recipe: Recipe) -> StepFacts:
        momentum = bool(recipe.optimizer.options.get("momentum", 0))
        return cls(
            recipe.optimizer.use,
            momentum,
            recipe.optimizer.clip is not None,
            updates_in_one_pass=offers_one_pass(recipe),
            hooks=bool(recipe.hooks),
            narrow_moments=recipe.optimizer.moments == "bf16",
        )


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch in one stage."""

    time: PartTime
    exchange: Exchange  # in the middle of parts
    stretches: tuple[Stretch, ...]
    sent: float  # bytes to the next stage
    extra: float  # that the device copies besides, for each micro-batch


def predicted_step(
    profile: ModelProfile, plan: Plan, cluster: Cluster, device: Device, facts: StepFacts
) -> StepPrediction:
    """Seconds of an optimizer step by kind, with the cluster's calibration."""
    step = uncalibrated_step(profile, plan, fabric_of(cluster, plan.ranks_per_gpu), device, facts)
    factor = cluster.calibration.factor
    return StepPrediction(
        compute=step.compute * factor("compute"),
        recompute=step.recompute * factor("recompute"),
        exposed_communication=step.exposed_communication * factor("exposed_communication"),
        bubble=step.bubble * factor("compute"),
        optimizer=step.optimizer * factor("optimizer"),
        data=step.data * factor("data"),
        overlapped_communication=step.overlapped_communication,
    )


def uncalibrated_step(
    profile: ModelProfile, plan: Plan, fabric: Fabric, device: Device, facts: StepFacts
) -> StepPrediction:
    return _timed(profile, plan, fabric, device, facts)[0]


def launching_seconds(profile: ModelProfile, plan: Plan, cluster: Cluster, device: Device, facts: StepFacts) -> float:
    """That a step takes longer because the host does not launch its operators fast enough; 0 if it does."""
    return _timed(profile, plan, fabric_of(cluster, plan.ranks_per_gpu), device, facts)[1]


def _timed(
    profile: ModelProfile, plan: Plan, fabric: Fabric, device: Device, facts: StepFacts
) -> tuple[StepPrediction, float]:
    """The step, and how much of it the device waits for the host."""
    profile = with_spared_blocks(profile, plan)
    mesh, micro_batches = plan.mesh, plan.accumulate
    running = device.running(plan.precision, plan.ranks_per_gpu)
    sharding = Sharding.of(plan, fabric)
    staged = [tuple(calls) for calls in staged_calls(profile, plan)]
    stages = {calls: _stage(calls, profile, plan, running, fabric, sharding) for calls in set(staged)}
    held = [
        tuple(staged[number] for number in stages_of(rank, mesh.pipeline, plan.stages_per_rank))
        for rank in range(mesh.pipeline)
    ]
    ranks = {
        own: _Rank.of([stages[calls] for calls in own], plan, fabric, sharding, running, facts) for own in set(held)
    }
    per_rank = [ranks[own] for own in held]
    pace = max(rank.micro_batch for rank in per_rank)
    mean = sum(rank.micro_batch for rank in per_rank) / len(per_rank)
    waiting = 0.0
    if mesh.pipeline > 1:
        share = bubble(plan.pipeline_schedule, mesh.pipeline, micro_batches, plan.stages_per_rank)
        waiting = micro_batches * (pace - mean + share * mean)
    slowest = max(per_rank, key=lambda rank: rank.step.exposed + rank.optimizer)

    def average(name: str) -> float:
        return micro_batches * float(sum(getattr(rank, name) for rank in per_rank)) / len(per_rank)

    compute, recompute = average("compute"), average("recompute")
    exposed = average("exposed") + slowest.step.exposed
    hidden = average("overlapped") + slowest.step.overlapped
    optimizer = slowest.optimizer
    # The host launches everything that the device does; where it is slower, all of it takes as long as launching it.
    host = max(micro_batches * rank.host + rank.host_optimizer for rank in per_rank) + running.speeds.host_step_seconds
    if plan.cuda_graph:
        host = GRAPHS_SECONDS
    lacking = host - (compute + recompute + exposed + waiting + optimizer)
    if mesh.pipeline == 1 and not plan.cuda_graph and any(profile.parts[number].waits for number in set(profile.calls)):
        held_up = micro_batches * _held_up(profile, plan, _setting(plan, running), per_rank[0])
        lacking = max(lacking, held_up - (compute + recompute + optimizer))
    lacking = max(0.0, lacking)
    of_optimizer = min(1.0, max(rank.host_optimizer for rank in per_rank) / host)
    step = StepPrediction(
        compute=compute + lacking * (1 - of_optimizer),
        recompute=recompute,
        exposed_communication=exposed,
        bubble=waiting,
        optimizer=optimizer + lacking * of_optimizer,
        data=facts.data_seconds,
        overlapped_communication=hidden,
    )
    return step, lacking


@dataclass(frozen=True)
class _Rank:
    """Seconds of one rank of a pipeline: of each micro-batch, and once in a step."""

    compute: float
    recompute: float
    exposed: float
    overlapped: float
    host: float
    step: Exchange
    optimizer: float
    host_optimizer: float

    @property
    def micro_batch(self) -> float:
        return self.compute + self.recompute + self.exposed

    @classmethod
    def of(
        cls, own: list[StageTime], plan: Plan, fabric: Fabric, sharding: Sharding, device: Device, facts: StepFacts
    ) -> _Rank:
        time = PartTime()
        middle = Exchange()
        extra = sum(stage.extra for stage in own)
        for stage in own:
            time = time.plus(stage.time)
            middle = middle.plus(stage.exchange)
        stretches = [stretch for stage in own for stretch in stage.stretches]
        hidden = device.speeds.overlaps_gradients
        if plan.sharded:
            each, once = shards_exchange(stretches, sharding, hidden=hidden)
            middle = middle.plus(each)
        else:
            once = replicas_exchange(stretches, sharding, hidden=hidden and plan.mesh.pipeline == 1)
        if plan.mesh.pipeline > 1:
            middle = middle.plus(Exchange(exposed=_sending(own, plan, fabric)))
        seconds, host = _optimizer(stretches, plan, device, facts)
        return cls(
            compute=time.forward + time.backward + extra,
            recompute=time.recompute,
            exposed=middle.exposed,
            overlapped=middle.overlapped,
            host=time.host,
            step=once,
            optimizer=seconds,
            host_optimizer=host,
        )


def _held_up(profile: ModelProfile, plan: Plan, setting: Setting, rank: _Rank) -> float:
    """Seconds of a micro-batch where forward reads values on the host.

    Each time the host waits until the device has done all that was launched, and has lost its lead: from then on the
    device waits wherever launching takes longer, even if all of it together would not.
    """
    times = [part_time(as_planned(profile, number, plan), setting) for number in profile.calls]
    waiting = [profile.parts[number].waits > 0 for number in profile.calls]
    forward = [(t.host_forward, t.forward, waits) for t, waits in zip(times, waiting, strict=True)]
    backward = [(t.host_recompute + t.host_backward, t.recompute + t.backward, False) for t in reversed(times)]
    launching_step = (rank.host_optimizer + setting.device.speeds.host_step_seconds) / plan.accumulate
    step = (launching_step, rank.optimizer / plan.accumulate, False)
    first = next(place for place, (_, _, waits) in enumerate(forward) if waits)
    host = device = 0.0  # both are at the first wait, where a cycle begins and ends
    for launching, running, waits in (*forward[first:], *backward, step, *forward[:first]):
        host = (max(host, device) if waits else host) + launching
        device = max(device + running, host)
    return device


def _setting(plan: Plan, device: Device) -> Setting:
    mesh = plan.mesh
    return Setting(
        device=device,
        micro_batch=plan.micro_batch,
        tensor=mesh.tensor,
        context=mesh.context,
        sequence_parallel=plan.sequence_parallel and mesh.tensor > 1,
        expert=mesh.expert,
        compiled=plan.compile,
        watched=plan.recompute == "selective" and not plan.compile,
    )


def _stage(
    calls: tuple[int, ...], profile: ModelProfile, plan: Plan, device: Device, fabric: Fabric, sharding: Sharding
) -> StageTime:
    """One micro-batch in some parts in a row. Parts that are called often are looked at once."""
    mesh, setting = plan.mesh, _setting(plan, device)
    per_node = fabric.ranks_per_node
    groups = Groups(
        tensor=group_of(mesh, ("tensor",), per_node),
        context=group_of(mesh, ("context",), per_node),
        expert=group_of(mesh, ("expert",), per_node),
        ring=plan.context_attention != "gather",
    )
    whole = PartTime()
    exchange = Exchange()
    extra = 0.0
    stretches: dict[int, Stretch] = {}
    for number, times in Counter(calls).items():
        part = as_planned(profile, number, plan)
        time, sent, stretches[number], copied = _call(part, setting, groups, fabric, sharding)
        whole, exchange, extra = whole.plus(time, times), exchange.plus(sent, times), extra + times * copied
    out = setting.size(profile.parts[calls[-1]].output)
    slices = mesh.tensor if setting.sequence_parallel or device.era == "2021" else 1
    return StageTime(whole, exchange, tuple(stretches[number] for number in calls), out / slices, extra)


def _call(
    part: Part, setting: Setting, groups: Groups, fabric: Fabric, sharding: Sharding
) -> tuple[PartTime, Exchange, Stretch, float]:
    plan = sharding.plan
    time = part_time(part, setting)
    # What is recomputed in full is sent again; selective recompute keeps what arrived, but gathers again.
    again = 0.0 if not part.recompute else 1.0 if plan.recompute == "full" else 0.5
    sent = tensor_exchange(part, setting, groups, fabric, repeats=1 + again)
    repeats = 2.0 if part.recompute and plan.recompute == "full" else 1.0
    sent = sent.plus(context_exchange(part, setting, groups, fabric, time, repeats=repeats))
    sent = sent.plus(expert_exchange(part, setting, groups, fabric, repeats=repeats))
    elements = elements_of(part, plan)
    stretch = Stretch(elements, part.block, time.forward, time.backward + time.recompute)
    copied = _added(elements, plan, setting.device)
    if plan.sharded:
        gather, scatter = copying_seconds(elements, sharding, setting.device)
        each = plan.zero == 3 and plan.mesh.pipeline == 1
        copied += gather * (2.0 if part.block else 1.0) if each else gather / plan.accumulate
        copied += scatter if plan.zero >= 2 and plan.mesh.pipeline == 1 else scatter / plan.accumulate
    if plan.activation_offload and part.block:
        waiting = (storage for storage in part.kept() if storage.role == "activation")
        kept = sum(setting.size(storage.bytes) / setting.share(storage) for storage in waiting)
        copied += 2 * kept / setting.device.speeds.host_copy_bytes_per_second  # in the order of the device's own work
    return time, sent, stretch, copied


def _added(elements: Elements, plan: Plan, device: Device) -> float:
    """Seconds, on the average of micro-batches, to add gradients to those of the ones before."""
    if plan.accumulate == 1:
        return 0.0
    shards = plan.mesh.shards if plan.zero >= 2 and plan.mesh.pipeline == 1 else 1
    rate = device.bytes_per_second * device.speeds.bandwidth["pointwise"]
    return ADD_BYTES * elements.trained / shards / rate * (plan.accumulate - 1) / plan.accumulate


def _sending(own: list[StageTime], plan: Plan, fabric: Fabric) -> float:
    """Seconds of a micro-batch between stages: activations forward and gradients back, from and to each stage here."""
    mesh = plan.mesh
    distance = mesh.shard * mesh.context * mesh.tensor  # between ranks of neighbouring stages
    crosses = distance >= fabric.ranks_per_node or mesh.pipeline * distance > fabric.ranks_per_node
    return sum(2 * send(stage.sent, fabric, crosses_nodes=crosses) for stage in own)


def _around_update(plan: Plan, facts: StepFacts) -> float:
    """Bytes of each trained element that are moved before and after an update."""
    clips = facts.clip or plan.precision == "fp16"
    measured = clips or plan.cuda_graph  # a recorded step has the norm of its gradients in any case
    if in_one_pass(plan, offered=facts.updates_in_one_pass):
        return (NARROW_NORM_BYTES if measured else 0.0) + (ROUNDING_BYTES if facts.hooks else 0.0)
    around = (NORM_BYTES if measured else 0.0) + (SCALE_BYTES if clips else 0.0)
    if plan.precision == "fp16":
        around += SCALE_BYTES
    if plan.accumulate > 1:
        around += SCALE_BYTES
    if plan.narrow_weights:
        around += ROUNDING_BYTES + WIDENING_BYTES * plan.accumulate
    return around


def _optimizer(stretches: list[Stretch], plan: Plan, device: Device, facts: StepFacts) -> tuple[float, float]:
    """Seconds of the device and of the host to clip gradients and to update what a rank holds."""
    speeds = device.speeds
    shards = plan.mesh.shards if plan.zero else 1
    expert_shards = max(1, shards // plan.mesh.expert)
    trained = sum(
        stretch.elements.shared_trained / shards + stretch.elements.expert_trained / expert_shards
        for stretch in stretches
    )
    tensors = sum(stretch.elements.tensors for stretch in stretches)
    each = OPTIMIZER_BYTES.get(facts.optimizer, OWN_OPTIMIZER_BYTES)
    if facts.optimizer == "sgd" and not facts.momentum:
        each = 12.0
    around = _around_update(plan, facts)
    if facts.narrow_moments:
        each = NARROW_MOMENTS_BYTES
    if in_one_pass(plan, offered=facts.updates_in_one_pass):
        each = ONE_PASS_NARROW_MOMENTS_BYTES if facts.narrow_moments else ONE_PASS_BYTES
    rate = device.bytes_per_second * speeds.bandwidth["optimizer"]
    if plan.offload == "cpu":
        crossing = 2 * 4.0 * trained / speeds.host_copy_bytes_per_second  # gradients there, parameters back
        return crossing + (each + around) * trained / HOST_MEMORY_BYTES_PER_SECOND, 0.0
    kernels = tensors * OPTIMIZER_KERNELS.get(facts.optimizer, 0)
    if facts.narrow_moments and not in_one_pass(plan, offered=facts.updates_in_one_pass):
        kernels = tensors * NARROW_MOMENTS_KERNELS
    on_device = (each + around) * trained / rate + kernels * speeds.kernel_seconds
    host = speeds.host_tensor_seconds + (speeds.host_clip_seconds if facts.clip or plan.precision == "fp16" else 0.0)
    return on_device, tensors * host + kernels * speeds.host_operator_seconds
