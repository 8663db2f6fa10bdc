"""Budget: what a whole run takes, from the time of one step: hours, GPU-hours, energy, money, and what failures cost.

A checkpoint stops training for a moment, the stall, while every rank copies its share of the state to host memory; it
is written beside training, by all nodes at once, and counts from when it is written.

Checkpoints and failures follow J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps" (Future Generation Computer Systems 22, 2006), which refines J. W. Young, "A first order approximation to the
optimum checkpoint interval" (Communications of the ACM 17, 1974). With δ the stall, τ the work between two
checkpoints, W the time to write one, R the time to restart and M the mean time between failures, which strike at
random (Poisson):

    best interval    τ = √(2δM) · (1 + ⅓·√(δ/2M) + ⅑·δ/2M) − δ      Young: τ = √(2δM); never below W
    goodput          G = τ / (M · e^(R'/M) · (e^((τ+δ)/M) − 1))     the share of time in steps that count

A failure loses the work since the newest checkpoint that was written by then, so W comes on top of Daly's loss:
R' = R + W. One save is under way at a time: with τ < W, training waits for the rest, and δ grows by W − τ. A run ends
when its last checkpoint is written, W after its last step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradus.data.source import source_options
from gradus.hardware.cluster import gpu_of
from gradus.planner.resolve import data_options
from gradus.planner.speed.host_copy import HostCopy
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.intervals import seconds_of
from gradus.schema.plan import Plan
from gradus.schema.prediction import BudgetPrediction
from gradus.schema.recipe import Recipe

HOUR, DAY = 3600.0, 86400.0

# What a node writes to a shared file system where the cluster file does not say: 273 GB/s from 384 nodes, saving
# Megatron-LM's trillion-parameter model on Selene (Narayanan et al. 2021, arXiv:2104.04473, section 5.10).
ASSUMED_WRITE_GB_PER_SECOND = 273 / 384
# From a failure until the next step is computed, besides the work that was lost: R of the examples in Daly 2006.
ASSUMED_RESTART_SECONDS = 600.0
# Where the cluster file does not say, for `checkpoint_every: auto` alone: 419 unexpected interruptions in 54 days on
# 16,384 GPUs, eight in a node (Llama 3, arXiv:2407.21783, section 3.3.4).
ASSUMED_FAILURES_PER_NODE_DAY = 419 / (54 * 16384 / 8)
# GPUs at their rated power the whole time, and nothing but GPUs: as reports on published models count it, for example
# BLOOM's 1,082,990 hours of 400 W = 433 MWh (Luccioni et al. 2022, arXiv:2211.02001).
ASSUMED_POWER_SHARE = 1.0


@dataclass(frozen=True)
class Length:
    """How long a run is. The last step of a budget in epochs may be short of samples."""

    samples: int
    steps: int


def length_of(recipe: Recipe, dataset: int | None, tokens_per_sample: int | None) -> Length | None:
    """What steps, epochs or tokens of the recipe come to. None: epochs of a dataset whose size is not known."""
    if recipe.steps is not None:
        return Length(recipe.steps * recipe.batch, recipe.steps)
    if recipe.epochs is not None:
        if dataset is None:
            return None
        samples = max(1, round(recipe.epochs * dataset))
        return Length(samples, math.ceil(samples / recipe.batch))
    assert recipe.tokens is not None, "the recipe was checked"
    if not tokens_per_sample:
        raise InputError(
            f"tokens: {recipe.data.use} has no tokens to count",
            hint="give the budget in steps or epochs",
            field="tokens",
        )
    steps = math.ceil(recipe.tokens / (recipe.batch * tokens_per_sample))
    return Length(steps * recipe.batch, steps)


def dataset_length(recipe: Recipe) -> int | None:
    """Training samples of a built-in source that can be opened on the spot.

    Not of text that would first have to be tokenised, nor of a dataset of the user's own, which needs their code.
    """
    if not recipe.data.built_in:
        return None
    options = source_options(recipe.data.use, data_options(recipe))
    if not options.ready:
        return None
    try:
        return options.training_samples(recipe.seed)
    except (InputError, ImportError, OSError):  # a package or a file that only the cluster has
        return None


def gpus_of(plan: Plan, cluster: Cluster) -> int:
    """GPUs that a plan occupies; 0 on a cluster without any."""
    return math.ceil(plan.mesh.world_size / plan.ranks_per_gpu) if cluster.gpus_per_node else 0


def nodes_of(plan: Plan, cluster: Cluster) -> int:
    gpus = gpus_of(plan, cluster)
    return math.ceil(gpus / cluster.gpus_per_node) if gpus else min(cluster.nodes, plan.mesh.world_size)


def young_interval(stall: float, between_failures: float) -> float:
    """Seconds of work between checkpoints, to first order."""
    return math.sqrt(2 * stall * between_failures)


def daly_interval(stall: float, between_failures: float) -> float:
    """Seconds of work between checkpoints, to higher order; right also where checkpoints take long between failures."""
    if stall >= 2 * between_failures or math.isinf(between_failures):
        return between_failures
    ratio = stall / (2 * between_failures)
    return young_interval(stall, between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def between_failures(plan: Plan, cluster: Cluster | None) -> float:
    """Mean seconds between failures of what a plan runs on, assumed where no cluster file says it."""
    known = cluster.failures_per_node_day if cluster is not None else None
    rate = ASSUMED_FAILURES_PER_NODE_DAY if known is None else known
    nodes = nodes_of(plan, cluster) if cluster is not None else 1
    return DAY / (rate * nodes) if rate else math.inf


def stopped_seconds(interval: float, stall: float, writing: float) -> float:
    """What a checkpoint takes from training: the stall, and waiting where the one before is not written by then."""
    return stall + max(0.0, writing - interval)


def expected_goodput(
    interval: float, stall: float, between_failures: float, restart: float, writing: float = 0.0
) -> float:
    """The share of time that goes into steps which count; the rest is spent on saving, lost or spent on restarting.

    Failures may strike while a checkpoint is saved or a restart is under way.
    """
    stopped = stopped_seconds(interval, stall, writing)
    try:
        needed = between_failures * math.exp((restart + writing) / between_failures)
        return interval / (needed * math.expm1((interval + stopped) / between_failures))
    except OverflowError:  # failures come far quicker than a checkpoint is written
        return 0.0


def writing_seconds(checkpoint_size: float, plan: Plan, cluster: Cluster) -> float:
    """Until a checkpoint is on the shared file system: all nodes write their ranks' parts at the same time."""
    return checkpoint_size / (nodes_of(plan, cluster) * write_gb_per_second(cluster) * 1e9)


def planned_interval(plan: Plan, step_seconds: float, best: float | None) -> float | None:
    """Seconds of work between checkpoints, as the plan has it; with `auto`, what a run is expected to find best."""
    every = plan.checkpoint_every
    if isinstance(every, int):
        return every * step_seconds
    return best if every == "auto" else seconds_of(every)


def budget(
    length: Length, step_seconds: float, checkpoint_size: float, stall: float, plan: Plan, cluster: Cluster
) -> BudgetPrediction:
    """The whole run on a cluster. GPU-hours, energy and money are those with failures, where their rate is known.

    `stall` is for how many seconds a checkpoint of so many bytes stops training.
    """
    seconds = length.steps * step_seconds
    writing = writing_seconds(checkpoint_size, plan, cluster)
    with_failures, best, goodput = None, None, None
    between = between_failures(plan, cluster)
    if cluster.failures_per_node_day or (cluster.failures_per_node_day is None and plan.checkpoint_every == "auto"):
        # A run that is over before its first checkpoint would be due writes one at its end.
        best = min(max(daly_interval(stall, between), writing), seconds)
    if cluster.failures_per_node_day == 0:
        with_failures, goodput = seconds, 1.0
    elif cluster.failures_per_node_day is not None:
        assert best is not None
        every = planned_interval(plan, step_seconds, best) or best
        with_failures = _seconds_with_failures(seconds, every, stall, between, writing)
        goodput = seconds / with_failures
    gpus = gpus_of(plan, cluster)
    gpu_hours = gpus * (with_failures if with_failures is not None else seconds) / HOUR if gpus else 0.0
    ends = math.isfinite(gpu_hours)
    watts = _watts(cluster) if ends else None
    price = cluster.price_per_gpu_hour if ends and cluster.gpus_per_node else None
    return BudgetPrediction(
        steps=length.steps,
        seconds=seconds,
        seconds_with_failures=with_failures,
        gpu_hours=gpu_hours,
        energy_kwh=gpu_hours * watts * ASSUMED_POWER_SHARE / 1000 if watts is not None else None,
        cost=gpu_hours * price if price is not None else None,
        checkpoint_stall_seconds=stall,
        checkpoint_seconds=writing,
        checkpoint_every_seconds=best,
        goodput=goodput,
    )


def _seconds_with_failures(
    seconds: float, interval: float, stall: float, between_failures: float, writing: float
) -> float:
    """A whole run, until its last checkpoint is written. Infinite if failures leave it no time to come on."""
    restart = ASSUMED_RESTART_SECONDS
    if interval < seconds:
        goodput = expected_goodput(interval, stall, between_failures, restart, writing)
    else:  # one checkpoint, at the end: there is none before it that it waits for
        goodput = expected_goodput(seconds, stall, between_failures, restart)
    return seconds / goodput + writing if goodput > 0 else math.inf


def budget_basis(cluster: Cluster, plan: Plan, copying: HostCopy) -> list[str]:
    """What the budget assumes, a sentence each."""
    known = cluster.storage.gb_per_second
    said = [
        "A checkpoint stops training while each rank copies its share of the state to host memory, at"
        f" {copying.bytes_per_second / 1e9:.3g} GB/s ({copying.source}).",
        f"Each node then writes its ranks' shares beside training, at {write_gb_per_second(cluster):.2g} GB/s"
        + (" (cluster file)." if known else " (assumed: what a node of Selene wrote, arXiv:2104.04473)."),
    ]
    if cluster.failures_per_node_day:
        said.append(
            f"Failures: {cluster.failures_per_node_day:g} for each node and day (cluster file), at random; a restart "
            f"is assumed to take {ASSUMED_RESTART_SECONDS / 60:g} min. Best interval after Daly 2006, from the stall;"
            " never less than writing takes, since one checkpoint is written at a time."
        )
    elif cluster.failures_per_node_day is None and plan.checkpoint_every == "auto":
        said.append(
            f"How often a checkpoint is best made: for {ASSUMED_FAILURES_PER_NODE_DAY:.2g} failures of a node in a day"
            " (assumed: Llama 3, arXiv:2407.21783; cluster file: failures_per_node_day)."
        )
    if _watts(cluster) is not None:
        said.append(f"Energy: of the GPUs alone, at their rated {_watts(cluster):g} W all the time.")
    return said


def write_gb_per_second(cluster: Cluster) -> float:
    return cluster.storage.gb_per_second or ASSUMED_WRITE_GB_PER_SECOND


def _watts(cluster: Cluster) -> float | None:
    """Rated power of a GPU, from the cluster file or the catalogue."""
    gpu = gpu_of(cluster)
    return gpu.power_watts if gpu else None
