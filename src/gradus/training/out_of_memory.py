"""Out of memory: told as what a rank holds, which part of it is too large, and what would fit.

The exception goes up as torch raises it, with the frames that hold the tensors; only where the run is known it is
explained. Every number of a moment is read there: nothing is run again, and nothing is allocated.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from gradus.models import catalogue
from gradus.planner.choice.fitting import Change, Shortage, binding_term, changes_that_fit
from gradus.planner.memory.model_state import ModelSize, ModelState
from gradus.record.format import bytes_text
from gradus.schema.errors import DoNotRestart
from gradus.schema.prediction import PREDICTION_FILE, Prediction
from gradus.training.memory import memory_of, size_of
from gradus.training.memory_snapshot import snapshot_at_out_of_memory

if TYPE_CHECKING:
    from gradus.training.live_run import LiveRun

_SAYS_SO = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB)|you tried to allocate (\d+) bytes")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# What was being done, by the function that did it; of several, the innermost counts.
_WORK = {
    ("model_to_step", "use_model"): "preparing the model",
    ("described", "described_model"): "building the model",
    ("described", "fill"): "building the model",
    ("live_run", "restore"): "loading the checkpoint",
    ("step", "_accumulated"): "the forward pass",
    ("pipeline_step", "_accumulated"): "a pipeline stage",
    ("step", "backward"): "the backward pass",
    ("step", "apply"): "the optimizer step",
    ("evaluation", "evaluate"): "an evaluation",
    ("saving", "save"): "saving a checkpoint",
}
_OTHERS_WORTH_TELLING = 2**30  # a CUDA context of this process is below it


class OutOfMemory(DoNotRestart):
    """The same run would run out of memory again."""

    kind = "out-of-memory"


@contextmanager
def out_of_memory_explained(live: LiveRun) -> Iterator[None]:
    """If memory runs out inside, the exception says what that means for the run."""
    try:
        yield
    except Exception as error:
        explained = explain_out_of_memory(error, live)
        if explained is error:
            raise
        raise explained from error


def explain_out_of_memory(error: BaseException, live: LiveRun) -> BaseException:
    """The explanation of an error that says that memory ran out; any other comes back as it is."""
    cause: BaseException | None = error
    while cause is not None and not is_out_of_memory(cause):
        cause = cause.__cause__  # code of the user's own may have raised it, and is blamed then
    if cause is None:
        return error
    explained = told(_shortage(cause, live))
    snapshot = snapshot_at_out_of_memory(live.run, live.attempt, live.world.rank, live.world.device)
    if snapshot is not None:
        explained.details["memory_snapshot"] = str(snapshot)
    return explained


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU, or of the host where torch says so."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_SAYS_SO.search(str(error)))


def told(shortage: Shortage) -> OutOfMemory:
    """The shortage in words."""
    changes = changes_that_fit(shortage)
    return OutOfMemory(
        "\n".join(_lines(shortage, changes)),
        hint=_hint(shortage, changes),
        field=next(iter(changes[0].keys), None) if changes else "plan.micro_batch",
        binds=binding_term(shortage),
        memory={
            "limit_bytes": shortage.limit_bytes,
            "used_bytes": shortage.used_bytes,
            "asked_bytes": shortage.asked_bytes,
            "parameters": shortage.held.parameters,
            "master": shortage.held.master,
            "gradients": shortage.held.gradients,
            "optimizer": shortage.held.optimizer,
            "rest": shortage.rest_bytes,
            **({"predicted": shortage.predicted.model_dump()} if shortage.predicted is not None else {}),
        },
        changes=[change.document() for change in changes],
    )


def _lines(shortage: Shortage, changes: list[Change]) -> Iterator[str]:
    used, asked = shortage.used_bytes, shortage.asked_bytes
    facts = [f"{bytes_text(used)} are in use"] if used is not None else []
    facts += [f"{bytes_text(asked)} {'more ' if facts else ''}were asked for"] if asked is not None else []
    facts += [shortage.limit] if shortage.limit else []
    yield f"out of memory in {shortage.where}" + (f": {', '.join(facts)}" if facts else "")
    yield from _table(shortage)
    yield from _foreseen(shortage)
    if shortage.others_bytes > _OTHERS_WORTH_TELLING:
        yield f"  other processes hold {bytes_text(shortage.others_bytes)} of this GPU"
    yield f"what binds: {_verdict(shortage)}"
    if changes:
        yield "what would fit, predicted for each rank:"
        for change in changes:
            seen = (
                f" + at least {bytes_text(change.activation_bytes)} of activations" if change.activation_bytes else ""
            )
            yield f"  {change.options}"
            yield f"      {bytes_text(change.state.total)} of model state{seen}: {change.why}"


def _table(shortage: Shortage) -> Iterator[str]:
    held, expected = shortage.held, shortage.expected
    rows: list[tuple[str, int, str]] = [("parameters", held.parameters, "")]
    if held.master or (expected is not None and expected.master):
        rows.append(("master copy of parameters", held.master, ""))
    rows.append(("gradients", held.gradients, _to_come(held.gradients, expected.gradients if expected else None)))
    rows.append(("optimizer state", held.optimizer, _to_come(held.optimizer, expected.optimizer if expected else None)))
    if shortage.used_bytes is not None:
        rows.append(("activations and buffers", shortage.rest_bytes, ""))
    if shortage.size is not None:
        rows[0] = (*rows[0][:2], f" ({shortage.size.parameters:,}, {shortage.size.trained:,} of them trained)")
    for name, size, note in rows:
        yield f"  {name:<26}{bytes_text(size):>10}{note}"


def _foreseen(shortage: Shortage) -> Iterator[str]:
    """What was predicted for the worst moment, in the terms of `gradus plan`, the largest first."""
    found = shortage.predicted
    if found is None:
        return
    kinds = {name: getattr(found, name) for name in type(found).model_fields}
    parts = sorted((name for name in kinds if kinds[name] > 0), key=lambda name: -kinds[name])
    said = ", ".join(f"{name.replace('_', ' ')} {bytes_text(kinds[name])}" for name in parts)
    yield f"  predicted for {shortage.predicted_at}: {bytes_text(found.peak)} ({said})"


def _to_come(now: int, expected: int | None) -> str:
    """Where a kind is not complete. A hundredth is rounding: shares are not always even."""
    return f" of {bytes_text(expected)} that a step needs" if expected is not None and now < 0.99 * expected else ""


def _verdict(shortage: Shortage) -> str:
    expected, limit = shortage.expected, shortage.limit_bytes
    if expected is None:
        return "the model itself, which is not complete yet"
    if shortage.state_fits or limit is None:
        state = f"parameters, gradients and optimizer state need {bytes_text(expected.total)}"
        return f"activations; {state}, what is left is theirs"
    term = binding_term(shortage)
    needs = {
        "parameters": expected.parameters + expected.master,
        "gradients": expected.gradients,
        "optimizer state": expected.optimizer,
    }[term]
    return (
        f"the {term} ({bytes_text(needs)}): parameters, gradients and optimizer state need "
        f"{bytes_text(expected.total)} together, {bytes_text(expected.total - limit)} more than there is, whatever the "
        "micro-batch"
    )


def _hint(shortage: Shortage, changes: list[Change]) -> str:
    if changes:
        return f"{changes[0].options} ({changes[0].why})"
    if shortage.size is None:
        return "use a smaller model, or a GPU with more memory"
    if shortage.state_fits and shortage.plan.micro_batch > 1:
        return "use a smaller plan.micro_batch: what a rank works on at once; the batch of the recipe stays as it is"
    return "no change of the plan that is known here would fit: use a smaller model, or GPUs with more memory"


def _shortage(error: BaseException, live: LiveRun) -> Shortage:
    device, plan = live.world.device, live.plan
    # Of a run that is still being put together, some parts are missing.
    step, optimizer = getattr(live, "step", None), getattr(live, "optimizer", None)
    model: nn.Module | None = getattr(live, "model", None)
    held = (
        memory_of(step.model if step is not None else model, optimizer, device) if model is not None else ModelState()
    )
    on_gpu = device.type == "cuda"
    limit_bytes, limit = _limit(live)
    foreseen = _prediction(live)
    return Shortage(
        where=_where(error),
        plan=plan,
        batch=live.recipe.batch,
        held=held,
        used_bytes=torch.cuda.memory_allocated(device) if on_gpu else None,
        asked_bytes=asked_bytes(str(error)),
        limit_bytes=limit_bytes,
        limit=limit,
        size=size_of(model, optimizer) if model is not None else _size_before_building(live),
        allows_bf16=not on_gpu or torch.cuda.get_device_capability(device) >= (8, 0),
        others_bytes=_held_by_others(device) if on_gpu else 0,
        fixed=live.recipe.plan.fixed,
        predicted=foreseen.memory if foreseen is not None else None,
        predicted_at=foreseen.peak_at if foreseen is not None else "",
        allows_chunks=live.may_chunk_loss,
    )


def _prediction(live: LiveRun) -> Prediction | None:
    """As the launcher left it. Nothing about it may stand in the way of the error that is being told."""
    try:
        return Prediction.load(live.run.attempt_path(live.attempt) / PREDICTION_FILE)
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _limit(live: LiveRun) -> tuple[int | None, str]:
    plan, device = live.plan, live.world.device
    if plan.memory_limit_gib is not None:
        return round(plan.memory_limit_gib * 2**30), f"plan.memory_limit_gib is {plan.memory_limit_gib:g} GiB"
    if device.type != "cuda":
        return None, ""
    whole = torch.cuda.get_device_properties(device).total_memory
    name = torch.cuda.get_device_name(device)
    if plan.ranks_per_gpu > 1:
        share = whole // plan.ranks_per_gpu
        return share, f"{plan.ranks_per_gpu} ranks share the {bytes_text(whole)} of a {name}: {bytes_text(share)} each"
    return whole, f"a {name} has {bytes_text(whole)}"


def _held_by_others(device: torch.device) -> int:
    free, whole = torch.cuda.mem_get_info(device)
    return max(0, whole - free - torch.cuda.memory_reserved(device))


def _size_before_building(live: LiveRun) -> ModelSize | None:
    """Of a reference model, which can be counted without memory."""
    recipe = live.recipe
    if not recipe.model.built_in or recipe.lora is not None:
        return None
    with torch.device("meta"):
        return size_of(catalogue.build(recipe.model.use, recipe.model.options))


def _where(error: BaseException) -> str:
    found = "the forward pass"  # an own loop computes it in code that is not ours
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        found = _WORK.get((Path(code.co_filename).stem, code.co_name), found)
    return found


def asked_bytes(text: str) -> int | None:
    """How much the request was for that failed, as torch says it."""
    match = _ASKED.search(text)
    if match is None:
        return None
    if match[3] is not None:
        return int(match[3])
    return round(float(match[1]) * _UNITS[match[2]])
