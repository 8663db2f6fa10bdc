"""Request: which trace of a model is wanted, and getting it: traced once, here or where torch may be loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradus.hardware.catalogue import find_gpu
from gradus.planner.profile.program import ModelProfile
from gradus.planner.profile.stored import from_text
from gradus.record.format import first_line
from gradus.schema.callables import is_import_path
from gradus.schema.cluster import Cluster, GpuNumbers
from gradus.schema.errors import GradusError, InputError
from gradus.schema.plan import Plan, Precision, Scaling
from gradus.schema.recipe import Recipe

NARROW: tuple[Precision, ...] = ("bf16", "fp16", "fp8")  # sharded parameters are gathered in 16 bits
_CHILD = "gradus.planner.profile.child"
_CHILD_SECONDS = 600  # a model that takes longer to trace is not traced
# Of a recipe, what changes what its model computes. The rest may differ and the trace is the same.
_TRACED = ("model", "data", "loss", "freeze", "lora", "tensor_plan", "pipeline_parts", "deterministic")


@dataclass(frozen=True)
class ProfileRequest:
    """What a trace depends on besides the recipe."""

    precision: Precision
    narrow_parameters: bool = False  # parameters are in 16 bits already, as gathered shards are
    capability: tuple[int, int] | None = None  # of the GPU, by which torch chooses attention kernels
    channels_last: bool = False
    fp8_scaling: Scaling | None = None  # of precision fp8
    loss_chunks: int = 1

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> ProfileRequest:
        capability = document["capability"]
        return cls(**{**document, "capability": tuple(capability) if capability is not None else None})


def request_for(plan: Plan, cluster: Cluster) -> ProfileRequest:
    """The trace that a plan is predicted from."""
    narrow = (plan.sharded or plan.narrow_weights) and plan.precision in NARROW
    scaling = plan.fp8_scaling if plan.precision == "fp8" else None
    return ProfileRequest(plan.precision, narrow, capability_of(cluster), plan.channels_last, scaling, plan.loss_chunks)


def capability_of(cluster: Cluster) -> tuple[int, int] | None:
    """The compute capability of the GPUs, from the cluster or the catalogue; None where neither knows."""
    given = cluster.gpu.compute_capability if isinstance(cluster.gpu, GpuNumbers) else None
    if given is not None:
        return given[0], given[1]
    known = find_gpu(cluster.gpu_name) if cluster.gpu_name else None
    return known.compute_capability if known else None


_known: dict[tuple[str, ProfileRequest], ModelProfile] = {}


def profile_for(recipe: Recipe, request: ProfileRequest) -> ModelProfile:
    return profiles_for(recipe, [request])[0]


def profiles_for(recipe: Recipe, requests: Sequence[ProfileRequest]) -> list[ModelProfile]:
    """The traces of a resolved recipe. Those that are missing are made in one go: most of it is loading torch."""
    digest = _digest(recipe)
    missing = [request for request in dict.fromkeys(requests) if (digest, request) not in _known]
    if missing:
        made = (
            [traced_here(recipe, request) for request in missing]
            if "torch" in sys.modules
            else _traced_elsewhere(recipe, missing)
        )
        _known.update(((digest, request), profile) for request, profile in zip(missing, made, strict=True))
    return [_known[digest, request] for request in requests]


def traced_here(recipe: Recipe, request: ProfileRequest) -> ModelProfile:
    """In this process, which loads torch."""
    from gradus.planner.profile.of_recipe import profile_of

    with recipe.blamed():
        try:
            return profile_of(
                recipe,
                precision=request.precision,
                narrow_parameters=request.narrow_parameters,
                capability=request.capability,
                channels_last=request.channels_last,
                fp8_scaling=request.fp8_scaling or "tensor",
                loss_chunks=request.loss_chunks,
            )
        except InputError:
            raise
        except GradusError as error:
            if "field" not in error.details:
                raise
            # A callable of the user's that wants a disk or a network: a run may have them, planning does without.
            hint = f"a plan is made without network, data or GPUs; {error.hint}"
            raise InputError(error.message, hint=hint, **error.details) from error
        except Exception as error:
            first = first_line(error)
            raise GradusError(
                f"the model could not be traced: {type(error).__name__}: {first}",
                hint="what it does in forward may depend on values, or reach outside of torch",
                traceback=traceback.format_exc(),
            ) from error


def _traced_elsewhere(recipe: Recipe, requests: Sequence[ProfileRequest]) -> list[ModelProfile]:
    question = {
        "recipe": recipe.model_dump(exclude_unset=True),
        "file": recipe._origin.file,
        "overrides": recipe._origin.overrides,
        "requests": [asdict(request) for request in requests],
    }
    # A trace allocates nothing on a device, and must not take memory of one that others use.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-m", _CHILD],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            env=environment,
            timeout=_CHILD_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise GradusError(f"the model was not traced within {_CHILD_SECONDS} seconds") from None
    if done.returncode:
        raise GradusError(
            f"tracing the model ended with {_ending(done.returncode)}",
            hint="this is a bug in gradus, or the machine ran out of memory",
            traceback=done.stderr[-8000:],
        )
    reply = json.loads(done.stdout)
    if "error" in reply:
        error: dict[str, Any] = reply["error"]
        kind = InputError if error.pop("bad_input") else GradusError
        error.pop("kind")
        raise kind(error.pop("message"), hint=error.pop("hint"), **error)
    return [from_text(text) for text in reply["profiles"]]


def _ending(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"signal {-code}"


def _digest(recipe: Recipe) -> str:
    """Equal for recipes whose models are traced alike. A file of the user's counts with the time of its last change."""
    chosen = {name: recipe.model_dump(include={name})[name] for name in _TRACED}
    named = [recipe.model.use, recipe.data.use, *([recipe.loss.use] if recipe.loss else [])]
    files = [name.rpartition(":")[0] for name in named if is_import_path(name)]
    changed = [Path(file).stat().st_mtime_ns for file in files if file.endswith(".py") and Path(file).exists()]
    return json.dumps([chosen, changed], sort_keys=True, default=str)
