"""ZeRO: the published formulas for what a rank holds of a model in training, before activations.

They speak of even shares of p parameters over d ranks. What a rank really holds is the sum of its shards, which are
uneven where rows do not divide; that is measured, and not computed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradus.schema.plan import Precision

MOMENTS = 2  # of Adam, for each parameter


@dataclass(frozen=True)
class ZeroBytes:
    """Bytes on one rank."""

    parameters: float  # M_m: those that are computed with
    master: float  # the copy in high precision that the optimizer changes; none where parameters have it already
    moments: float  # the rest of the optimizer's state
    gradients: float  # M_g, at most

    @property
    def optimizer(self) -> float:
        """M_o."""
        return self.master + self.moments

    @property
    def total(self) -> float:
        return self.parameters + self.optimizer + self.gradients


def zero_bytes(
    parameters: int, zero: int, ranks: int, *, low: int = 2, high: int = 4, gradient: int | None = None
) -> ZeroBytes:
    """M_m, M_o and M_g of p `parameters` over d `ranks` under zero 0 to 3.

    `low` and `high` are k_l and k_h, the bytes of a number in the precision of computing and of the optimizer;
    gradients have `gradient` bytes, k_l unless it is given.

        M_m = k_l·p                 divided by d with zero 3
        M_o = 3·k_h·p               divided by d with zero 1 and above; without a master copy 2·k_h·p
        M_g = k_l·p or k_h·p        divided by d with zero 2 and above
    """
    assert 0 <= zero <= 3, f"zero {zero}"
    assert ranks >= 1, f"{ranks} ranks"

    def share(size: int, divided_from: int) -> float:
        return parameters * size / ranks if zero >= divided_from else float(parameters * size)

    return ZeroBytes(
        parameters=share(low, 3),
        master=share(high, 1) if low < high else 0.0,
        moments=share(MOMENTS * high, 1),
        gradients=share(gradient if gradient is not None else low, 2),
    )


def number_bytes(precision: Precision) -> tuple[int, int]:
    """k_l and k_h of a precision. fp8 concerns matrix multiplications only: parameters are gathered in bf16."""
    return {"fp64": (8, 8), "fp32": (4, 4), "tf32": (4, 4), "bf16": (2, 4), "fp16": (2, 4), "fp8": (2, 4)}[precision]
