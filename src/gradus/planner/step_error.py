"""Step error: how far the predicted time of a step may be from what is measured, by what the prediction rests on."""

from __future__ import annotations

from gradus.planner.speed.device import Device
from gradus.schema.calibration import Calibration
from gradus.schema.plan import Plan

# Of a GPU whose kernels were measured: benchmarks/plan_accuracy.md. Four of five eager steps on the H200 are within
# 9 %, nine of ten within 15 %; of nine compiled steps the worst is 17 % off.
MEASURED, MEASURED_COMPILED = 0.12, 0.15
# Factors that --measure found for the model on the device: half of 28 such predictions are within 3.1 %, the worst is
# 12 % off (the same table).
CALIBRATED = 0.06
# Shares of the peak as of another generation of the same vendor, the same libraries above them: twice the error of
# what was measured. Another vendor's kernels and libraries were never compared: a factor of two is no surprise there.
SAME_VENDOR, OTHER_VENDOR = 0.25, 0.50
# A step in proportion to its FLOPs, at a rate that was measured with another shape of it, as on CPUs.
ACHIEVED_RATE = 0.25
# More where ranks talk across nodes: links that others use too, and nodes that wait for the slowest. Published steps of
# up to 3,072 GPUs are met within 10 % on average (benchmarks/published_tables.py).
ACROSS_NODES = 0.10


def step_error(
    plan: Plan, device: Device | None, calibration: Calibration, *, of_nvidia: bool, across_nodes: bool
) -> float:
    """The stated relative error of a predicted step. Without a device, it goes by the FLOP/s that were achieved."""
    if device is None:
        error = ACHIEVED_RATE
    elif "compute" in calibration.factors:
        error = CALIBRATED
    else:
        if device.speeds.own_products:
            error = MEASURED_COMPILED if plan.compile else MEASURED
        else:
            error = SAME_VENDOR if of_nvidia else OTHER_VENDOR
        # How clocks follow a lowered power limit was not measured. No kernel loses more than its share of the power.
        error += 1 - device.power_share
    return round(error + (ACROSS_NODES if across_nodes else 0.0), 4)
