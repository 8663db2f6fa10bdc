"""Communication: transfers that nothing hides, and more ranks than the work is worth."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Finding
from gradus.diagnosis.rules.cores import threads_beyond_cores
from gradus.diagnosis.rules.pipeline import bubble_share
from gradus.launcher.preflight.nccl_log import read_nccl_log
from gradus.record.amdahl import fraction_of
from gradus.record.directory import RunDirectory
from gradus.record.few_lines import few_lines
from gradus.record.metrics import merge_by_step
from gradus.schema.breakdown import Breakdown
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe

# Of a step. On a GPU, a well-overlapped step exposes a few percent. Ranks on a CPU share cores and talk through the
# kernel: each exchange costs them milliseconds, however little there is to say.
GPU_SHARE, CPU_SHARE = 0.15, 0.35
GPU_SECONDS, CPU_SECONDS = 0.0005, 0.02
# From here on a second GPU does half of what the first does, or less.
HALF = 0.5
MIB = 2**20
MANY_BUCKETS = 64  # each costs the latency of an all-reduce
MULTIPLE_OF_BUCKETS = 8
WARM_UP_ROWS = 3
FEW_LINES = 2_000  # of another run's metrics: a median needs no more, and there may be many runs beside this one
# Of a recipe, that make two runs the same work on other ranks.
SAME_WORK = ("model", "data", "batch", "optimizer", "loss", "hooks", "evaluate", "checkpoint", "deterministic")


def transfer_seconds(evidence: Evidence) -> float:
    """Seconds of a step that communication is exposed on the rank that waits least in it.

    The others also wait for that one, which need not be the same in every step; and in a pipeline, all of them wait for
    its filling and draining.
    """
    by_step: dict[int, list[Breakdown]] = {}
    for one in evidence.steady:
        by_step.setdefault(one.step, []).append(one)
    ranks = max(map(len, by_step.values()), default=0)
    whole = [ones for ones in by_step.values() if len(ones) == ranks]  # of a run that died, or goes on, some have more
    steps = sum(ones[0].steps for ones in whole)
    waits = sum(min(one.seconds.get("exposed_communication", 0.0) for one in ones) * ones[0].steps for ones in whole)
    exposed = waits / steps if steps else 0.0
    idle = bubble_share(evidence.plan) * (evidence.step_seconds or 0.0) if evidence.plan else 0.0
    return max(0.0, exposed - idle)


def exposed_communication(evidence: Evidence) -> Finding | None:
    step, seconds = evidence.judged_step_seconds, transfer_seconds(evidence)
    least_share, least = (GPU_SHARE, GPU_SECONDS) if evidence.has_gpu else (CPU_SHARE, CPU_SECONDS)
    if not step or evidence.ranks < 2 or seconds < max(least, least_share * (evidence.training_seconds or step)):
        return None
    if threads_beyond_cores(evidence):  # ranks then wait for cores, not for transfers
        return None
    plan, gradient_bytes = evidence.plan, _gradient_bytes(evidence)
    overlap = [trace.overlap for trace in evidence.traces if trace.overlap is not None]
    facts = {
        "exposed_communication_seconds": seconds,
        "step_seconds": step,
        "share": seconds / step,
        "ranks": evidence.ranks,
        "gradient_bytes": gradient_bytes,
        "mesh": str(plan.mesh) if plan else None,
        "bucket_mib": plan.bucket_mib if plan and not plan.sharded else None,
        "overlap_share": min(overlap) if overlap else None,
    }
    return Finding(
        "exposed-communication",
        f"{seconds / step:.0%} of a step is communication that no computing hides",
        facts,
        _change(evidence, plan, gradient_bytes),
        seconds / step,
        evidence.confidence,
        not_measured=() if overlap else ("how much is hidden beside it: gradus train --profile steps=5",),
    )


def exposed_in_a_trace(evidence: Evidence) -> Finding | None:
    """Of traces without a run. The rank that waits least shows what is transfer, and not waiting for a slow rank."""
    traces = [trace for trace in evidence.traces if trace.span_seconds > 0]
    if evidence.timings or not traces:
        return None
    share = min(trace.exposed_communication_seconds / trace.span_seconds for trace in traces)
    least_share, least = (GPU_SHARE, 0.0) if traces[0].device == "cuda" else (CPU_SHARE, CPU_SECONDS)
    if share < least_share or min(trace.per_step(trace.exposed_communication_seconds) for trace in traces) < least:
        return None
    overlap = [trace.overlap for trace in traces if trace.overlap is not None]
    return Finding(
        "exposed-communication",
        f"{share:.0%} of the traced steps is communication that no computing hides",
        {
            "exposed_communication_seconds": sum(trace.exposed_communication_seconds for trace in traces),
            "communication_seconds": sum(trace.communication_seconds for trace in traces),
            "share": share,
            "overlap_share": min(overlap) if overlap else None,
        },
        "more work between exchanges: a larger batch for each rank, gradient accumulation (no_sync), larger buckets",
        share,
        "medium",
        not_measured=() if len(traces) > 1 else ("how long it waited for a slower rank: traces of the other ranks",),
    )


def _gradient_bytes(evidence: Evidence) -> int | None:
    """As they travel: fp32, unless they are compressed."""
    parameters = evidence.start.get("parameters")
    if not isinstance(parameters, int):
        return None
    return parameters * (2 if evidence.plan and evidence.plan.compression == "bf16" else 4)


def _change(evidence: Evidence, plan: Plan | None, gradient_bytes: int | None) -> str:
    """Which of the remedies fits the plan, the one that changes least first."""
    if plan is None:
        return "more work between exchanges: a larger batch for each rank, or gradient accumulation (no_sync)"
    mesh = plan.mesh
    per_node = max(1, evidence.ranks_on_a_node)
    nodes = -(-mesh.world_size // per_node)
    if mesh.tensor > per_node and mesh.tensor % per_node == 0:
        inside = mesh.model_copy(update={"tensor": per_node, "replicate": mesh.replicate * mesh.tensor // per_node})
        return f"--set 'plan.mesh={inside.flow()}': tensor parallelism belongs inside a node"
    if mesh.shard > per_node and nodes > 1 and mesh.shard % per_node == 0:
        hybrid = mesh.model_copy(update={"shard": per_node, "replicate": mesh.replicate * mesh.shard // per_node})
        return f"--set 'plan.mesh={hybrid.flow()}': shard inside a node, replicate between nodes"
    if plan.zero == 3 and plan.accumulate > 1:
        return "--set plan.zero=2: parameters are gathered once a step and not for each micro-batch, if memory allows"
    remedies = []
    if not plan.sharded and gradient_bytes is not None:
        buckets = gradient_bytes / (plan.bucket_mib * MIB)
        if buckets > MANY_BUCKETS:
            fitting = max(25, round(gradient_bytes / MIB / MULTIPLE_OF_BUCKETS))
            remedies.append(f"--set plan.bucket_mib={fitting} (there are {buckets:.0f} buckets)")
        elif buckets <= 1 and gradient_bytes > MULTIPLE_OF_BUCKETS * MIB:
            fitting = max(1, gradient_bytes // MIB // MULTIPLE_OF_BUCKETS)
            remedies.append(f"--set plan.bucket_mib={fitting} (one bucket leaves nothing to overlap with)")
    if plan.mesh.replicate > 1 and plan.compression == "none" and not plan.sharded:
        remedies.append("--set plan.compression=bf16")
    larger = evidence.recipe.batch * 2 if evidence.recipe else None
    remedies.append(
        f"a larger batch, accumulated before each exchange (--set batch={larger} --set plan.accumulate="
        f"{plan.accumulate * 2})"
        if larger
        else "a larger batch"
    )
    return "; or ".join(remedies)


def nccl_over_sockets(evidence: Evidence) -> Finding | None:
    """Only said by a log with NCCL_DEBUG=INFO, and only of interest between nodes."""
    if evidence.ranks_on_a_node >= evidence.ranks:
        return None
    for name, text in evidence.log_beginnings.items():
        found = read_nccl_log(text)
        if not found.over_sockets:
            continue
        share = evidence.share("exposed_communication")
        reasons = "; ".join(found.reasons)
        return Finding(
            "nccl-sockets",
            "NCCL talks through TCP sockets between nodes, and not through the fast network",
            {
                "log": name,
                "devices": list(found.devices),
                "exposed_communication_share": share if evidence.timings else None,
                "reasons": reasons or None,
            },
            "in the cluster file: network: {interface: <the InfiniBand interface>, variables: {NCCL_IB_HCA: <devices>}}"
            "; then gradus preflight says whether it is used",
            share if evidence.timings else None,
            "high" if found.channels else "medium",
        )
    return None


def too_many_gpus(evidence: Evidence) -> Finding | None:
    """By another run of the same recipe on fewer ranks; else, on GPUs, by how little of a step is work."""
    return _beside_smaller_run(evidence) or _mostly_exposed(evidence)


def _mostly_exposed(evidence: Evidence) -> Finding | None:
    step = evidence.judged_step_seconds
    if not step or not evidence.has_gpu or evidence.ranks < 2 or transfer_seconds(evidence) < HALF * step:
        return None
    share = transfer_seconds(evidence) / step
    return Finding(
        "too-many-gpus",
        f"{evidence.ranks} GPUs do less than half of what they could: {share:.0%} of a step is exchange between them",
        {"ranks": evidence.ranks, "exposed_communication_share": share, "efficiency_share": 1 - share},
        f"--nproc {max(1, evidence.ranks // 2)}, or a larger batch for as many",
        None,
        "medium",
        "waste",
        not_measured=("the same recipe on fewer GPUs: gradus bench scaling",),
    )


def _beside_smaller_run(evidence: Evidence) -> Finding | None:
    """Efficiency against the run of the same work on the fewest ranks that lies beside this one."""
    run, recipe, plan = evidence.run, evidence.recipe, evidence.plan
    mine = _samples_per_second(run) if run else None
    if run is None or recipe is None or plan is None or plan.mesh.world_size < 2 or mine is None:
        return None
    if evidence.is_own_loop:  # whose work its recipe does not tell
        return None
    if (
        not evidence.has_gpu and (evidence.step_seconds or 0.0) < CPU_SECONDS
    ):  # a toy: to exchange anything takes longer
        return None
    others = [found for path in run.path.parent.iterdir() if (found := _alike(path, run, recipe)) is not None]
    smaller = [(ranks, rate) for ranks, rate in others if ranks < plan.mesh.world_size]
    if not smaller:
        return None
    ranks, rate = min(smaller)
    speedup, ways = mine / rate, plan.mesh.world_size / ranks
    # Ranks on a CPU share its cores, and are no faster together: only what is slower than before is told.
    if speedup >= (HALF * ways if evidence.has_gpu else 0.7):
        return None
    parallel = fraction_of(speedup, ways) if speedup > 1 else 0.0
    return Finding(
        "too-many-gpus",
        f"{plan.mesh.world_size} ranks are {speedup:.2f} times as fast as {ranks}: an efficiency of "
        f"{speedup / ways:.0%}",
        {
            "samples_per_second": mine,
            "samples_per_second_of_fewer": rate,
            "ranks": plan.mesh.world_size,
            "fewer_ranks": ranks,
            "efficiency_share": speedup / ways,
            "amdahl_parallel_fraction": round(parallel, 4),
        },
        f"--nproc {ranks}, or a larger batch for {plan.mesh.world_size} ranks",
        None,  # what holds them up, if anything does, is told with its own gain, and first
        "high" if evidence.steps_measured >= 10 else "low",
        "waste",
    )


def _alike(path: Path, run: RunDirectory, recipe: Recipe) -> tuple[int, float] | None:
    """Ranks and speed of another run of the same work."""
    if path == run.path or not (path / "attempts").is_dir():
        return None
    other = Evidence.of_run(RunDirectory(path))
    if other.recipe is None or other.plan is None:
        return None
    if any(getattr(other.recipe, name) != getattr(recipe, name) for name in SAME_WORK):
        return None
    rate = _samples_per_second(RunDirectory(path))
    return (other.plan.mesh.world_size, rate) if rate is not None else None


def _samples_per_second(run: RunDirectory) -> float | None:
    rows = merge_by_step(few_lines(run.metrics_path, FEW_LINES))
    rates = [row["samples_per_second"] for row in rows if row.get("samples_per_second")]
    return median(rates[WARM_UP_ROWS:]) if len(rates) > WARM_UP_ROWS else None


RULES = (exposed_communication, exposed_in_a_trace, nccl_over_sockets, too_many_gpus)
