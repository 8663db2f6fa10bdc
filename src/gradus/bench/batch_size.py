"""Batch size: what becomes of the accuracy when the batch grows and the samples stay as many.

The learning rate grows with the batch (linear scaling), with and without a warm-up: the talks' lesson is that large
batches need one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from gradus.bench.result import BenchResult, bench_environment, finite
from gradus.bench.tried import Ranks, Trial, Tried
from gradus.record.chart import Chart, Series
from gradus.record.format import metric_text
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe

WARM_UP_SHARE = 0.2  # of the steps
_DIGITS = {  # small, real, and in the package that it comes with
    "name": "digits",
    "model": {"use": "mnist-cnn", "dropout": 0.25},
    "data": {"use": "digits", "size": 28, "channels": 1},
    "batch": 32,
    "epochs": 8,
    "optimizer": {"use": "adamw", "lr": 1e-3, "decay": "cosine"},
    "evaluate": {"metric": "accuracy"},
    "seed": 1,
}


def digits() -> dict[str, Any]:
    """The recipe that is tried when none is given."""
    return dict(_DIGITS)


def batch_size(
    recipe: Recipe,
    plan: Plan,
    batches: Sequence[int],
    samples: int,
    *,
    seeds: int,
    say: Callable[[str], None],
    warm_up_share: float = WARM_UP_SHARE,
    limit_seconds: float = 600.0,
) -> BenchResult:
    """For each batch, the same number of samples, the learning rate in proportion; with a warm-up and without."""
    base = recipe.optimizer.lr_batch or recipe.batch
    for batch in batches:
        if batch * 2 > samples:
            raise InputError(
                f"--batch: found {batch}, but {samples} samples are fewer than two steps of it",
                hint=f"use --samples {batch * 20}, or smaller batches",
                field="--batch",
                found=batch,
                allowed=f"at most {samples // 2}",
            )
    rows = []
    curves: list[Series] = []
    with Ranks(1) as ranks:
        for batch in batches:
            for warm in (False, True):
                tries = [
                    ranks.try_out(
                        _trial(recipe, plan, batch, base, samples, warm_up_share if warm else 0.0, seed, limit_seconds)
                    )
                    for seed in range(recipe.seed, recipe.seed + seeds)
                ]
                rows.append(_row(recipe, batch, base, samples, warm, tries))
                losses = tries[0].losses
                title = f"batch {batch}, {'warm-up' if warm else 'no warm-up'}"
                seen = [batch * (step + 1) for step in range(len(losses))]
                curves.append(Series(title, seen, [finite(loss) for loss in losses], dashed=not warm))
                say(f"{title}: {_told(rows[-1])}")
    return _result(recipe, base, samples, seeds, warm_up_share, rows, curves)


def _trial(
    recipe: Recipe, plan: Plan, batch: int, base: int, samples: int, share: float, seed: int, limit_seconds: float
) -> Trial:
    steps = max(2, samples // batch)
    warmup = max(1, round(steps * share)) if share else 0
    optimizer = recipe.optimizer.model_copy(update={"lr_scaling": "linear", "lr_batch": base, "warmup": warmup})
    # What can be evaluated is: the last batch of a few hundred samples says little.
    evaluate = recipe.evaluate.model_copy(update={"batches": None})
    changed = recipe.model_copy(
        update={"batch": batch, "optimizer": optimizer, "seed": seed, "evaluate": evaluate, "on_spike": "ignore"}
    )
    alone = plan.model_copy(update={"micro_batch": batch, "accumulate": 1})
    return Trial(changed, alone, steps=steps - 1, warm_up=1, whole=True, evaluate=True, limit_seconds=limit_seconds)


def _row(recipe: Recipe, batch: int, base: int, samples: int, warm: bool, tries: list[Tried]) -> dict[str, Any]:
    metric = recipe.evaluate.metric
    failure = next((tried for tried in tries if not tried.measured), None)
    values = [finite(tried.evaluation.get(metric, math.nan)) for tried in tries if tried.measured]
    known = [value for value in values if value is not None]
    last = finite(tries[0].losses[-1]) if tries[0].losses else None
    return {
        "batch": batch,
        "warmup": warm,
        "steps": max(2, samples // batch),
        "lr": recipe.optimizer.lr * batch / base,
        metric if metric != "loss" else "validation_loss": sum(known) / len(known) if known else None,
        "values": values,
        "training_loss": last,
        "diverged": failure is None and (last is None or not known),
        "why": failure.why if failure else "",
    }


def _told(row: dict[str, Any]) -> str:
    if row["why"]:
        return str(row["why"])
    if row["diverged"]:
        return "diverged: the loss is no number"
    name = next(key for key in row if key not in ("batch", "warmup", "steps", "lr"))
    return f"{name} {metric_text(name, row[name])}"


def _result(
    recipe: Recipe,
    base: int,
    samples: int,
    seeds: int,
    share: float,
    rows: list[dict[str, Any]],
    curves: list[Series],
) -> BenchResult:
    name = recipe.evaluate.metric if recipe.evaluate.metric != "loss" else "validation_loss"

    def series(warm: bool) -> Series:
        of_kind = [row for row in rows if row["warmup"] is warm]
        label = f"warm-up over {share:.0%} of the steps" if warm else "no warm-up"
        return Series(label, [row["batch"] for row in of_kind], [row[name] for row in of_kind], dashed=not warm)

    return BenchResult(
        kind="batch-size",
        title=f"{name.replace('_', ' ').capitalize()} against batch size: {recipe.name}",
        settings={
            "recipe": recipe.name,
            "samples": samples,
            "learning_rate": recipe.optimizer.lr,
            "chosen_for_batch": base,
            "scaling": "linear",
            "warm_up_share": share,
            "seeds": seeds,
        },
        rows=rows,
        summary={"metric": name, "diverged": [f"batch {row['batch']}" for row in rows if row["diverged"]]},
        charts=(
            Chart(
                f"{name.replace('_', ' ')} after {samples:,} samples",
                "batch",
                name.replace("_", " "),
                (series(False), series(True)),
                log_x=True,
                points=True,
                x_is_log_2=True,
                note="the learning rate grows in proportion to the batch; a gap is a run that diverged",
            ),
            Chart("Training loss", "samples", "loss", tuple(curves)),
        ),
        environment=bench_environment(),
    )
