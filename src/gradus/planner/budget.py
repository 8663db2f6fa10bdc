"""Budget: what a whole run takes, from the time of one step: hours, GPU-hours, energy, money, and what failures cost.

Checkpoints and failures follow J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps" (Future Generation Computer Systems 22, 2006), which refines J. W. Young, "A first order approximation to the
optimum checkpoint interval" (Communications of the ACM 17, 1974). With δ the time to write a checkpoint, τ the work
between two of them, R the time to restart and M the mean time between failures, which strike at random (Poisson):

    best interval    τ = √(2δM) · (1 + ⅓·√(δ/2M) + ⅑·δ/2M) − δ      Young: τ = √(2δM)
    goodput          G = τ / (M · e^(R/M) · (e^((τ+δ)/M) − 1))      the share of time in steps that count
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradus.data.source import source_options
from gradus.data.sources.options import Options
from gradus.hardware.cluster import gpu_of
from gradus.planner.resolve import data_options
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan
from gradus.schema.prediction import BudgetPrediction
from gradus.schema.recipe import Recipe

HOUR, DAY = 3600.0, 86400.0

# What a node writes to a shared file system where the cluster file does not say: 273 GB/s from 384 nodes, saving
# Megatron-LM's trillion-parameter model on Selene (Narayanan et al. 2021, arXiv:2104.04473, section 5.10).
ASSUMED_WRITE_GB_PER_SECOND = 273 / 384
# From a failure until the next step is computed, besides the work that was lost: R of the examples in Daly 2006.
ASSUMED_RESTART_SECONDS = 600.0
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
    if type(options).prepare is not Options.prepare:
        return None
    try:
        return options.open("train", recipe.seed).length
    except (InputError, ImportError, OSError):  # a package or a file that only the cluster has
        return None


def checkpoint_bytes(parameters: int, trained: int, optimizer_tensors: float, plan: Plan) -> float:
    """What a checkpoint holds: parameters as the optimizer keeps them, and its state. No 16-bit copies or gradients."""
    wide = 8 if plan.precision == "fp64" else 4
    return wide * (parameters + optimizer_tensors * trained)


def gpus_of(plan: Plan, cluster: Cluster) -> int:
    """GPUs that a plan occupies; 0 on a cluster without any."""
    return math.ceil(plan.mesh.world_size / plan.ranks_per_gpu) if cluster.gpus_per_node else 0


def nodes_of(plan: Plan, cluster: Cluster) -> int:
    gpus = gpus_of(plan, cluster)
    return math.ceil(gpus / cluster.gpus_per_node) if gpus else min(cluster.nodes, plan.mesh.world_size)


def young_interval(checkpoint_seconds: float, between_failures: float) -> float:
    """Seconds of work between checkpoints, to first order."""
    return math.sqrt(2 * checkpoint_seconds * between_failures)


def daly_interval(checkpoint_seconds: float, between_failures: float) -> float:
    """Seconds of work between checkpoints, to higher order; right also where checkpoints take long between failures."""
    if checkpoint_seconds >= 2 * between_failures:
        return between_failures
    ratio = checkpoint_seconds / (2 * between_failures)
    return young_interval(checkpoint_seconds, between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - (
        checkpoint_seconds
    )


def expected_goodput(interval: float, checkpoint_seconds: float, between_failures: float, restart: float) -> float:
    """The share of time that goes into steps which count; the rest is written, lost or spent on restarting.

    Failures may strike while a checkpoint is written or a restart is under way.
    """
    try:
        needed = between_failures * math.exp(restart / between_failures)
        return interval / (needed * math.expm1((interval + checkpoint_seconds) / between_failures))
    except OverflowError:  # failures come far quicker than a checkpoint is written
        return 0.0


def budget(
    length: Length, step_seconds: float, checkpoint_size: float, plan: Plan, cluster: Cluster
) -> BudgetPrediction:
    """The whole run on a cluster. GPU-hours, energy and money are those with failures, where their rate is known."""
    seconds = length.steps * step_seconds
    saving = checkpoint_size / (write_gb_per_second(cluster) * 1e9)
    with_failures, every, goodput = None, None, None
    if cluster.failures_per_node_day == 0:
        with_failures, goodput = seconds, 1.0
    elif cluster.failures_per_node_day is not None:
        between = DAY / (cluster.failures_per_node_day * nodes_of(plan, cluster))
        # A run that is over before its first checkpoint would be due writes one at its end.
        every = min(daly_interval(saving, between), seconds)
        goodput = expected_goodput(every, saving, between, ASSUMED_RESTART_SECONDS)
        with_failures = seconds / goodput if goodput > 0 else math.inf
        goodput = goodput if math.isfinite(with_failures) else 0.0
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
        checkpoint_seconds=saving,
        checkpoint_every_seconds=every,
        goodput=goodput,
    )


def budget_basis(cluster: Cluster) -> list[str]:
    """What the budget assumes, a sentence each."""
    known = cluster.storage.gb_per_second
    said = [
        f"A checkpoint is written by one rank while the others wait, at {write_gb_per_second(cluster):.2g} GB/s"
        + (" (cluster file)." if known else " (assumed: what a node of Selene wrote, arXiv:2104.04473).")
    ]
    if cluster.failures_per_node_day:
        said.append(
            f"Failures: {cluster.failures_per_node_day:g} for each node and day (cluster file), at random; a restart "
            f"is assumed to take {ASSUMED_RESTART_SECONDS / 60:g} min. Interval and goodput after Daly 2006."
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
