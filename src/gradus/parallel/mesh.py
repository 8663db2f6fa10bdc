"""What this version can split, and a refusal with the reason for what it cannot."""

from __future__ import annotations

from gradus.schema.errors import InputError
from gradus.schema.plan import Plan


def check_supported(plan: Plan) -> None:
    """Refuse a plan that asks for a way of splitting that is not built yet, before any process starts."""
    for name in ("pipeline", "shard", "context", "tensor", "expert"):
        ways = getattr(plan.mesh, name)
        if ways > 1:
            raise _refused(f"plan.mesh.{name}", ways, 1, "use mesh.replicate, or leave the mesh to gradus")
    if plan.zero:
        raise _refused("plan.zero", plan.zero, 0, "sharding is not in this version; use mesh.replicate")
    if plan.recompute != "none":
        raise _refused("plan.recompute", plan.recompute, "none", "a smaller plan.micro_batch also saves memory")
    if plan.offload != "none":
        raise _refused("plan.offload", plan.offload, "none", "a smaller plan.micro_batch also saves memory")
    if plan.precision == "fp8":
        raise _refused("plan.precision", "fp8", "fp32, tf32, bf16, fp16, fp64", "bf16 is the nearest")


def _refused(field: str, found: object, allowed: object, hint: str) -> InputError:
    return InputError(
        f"{field}: found {found}, but this version supports only {allowed}",
        hint=hint,
        field=field,
        found=found,
        allowed=allowed,
    )
