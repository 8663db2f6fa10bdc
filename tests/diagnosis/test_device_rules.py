"""Rules about GPUs and their memory, on runs that were made up: no test has such a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from made_up_runs import GIB, ON_GPU, run_with

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.explain import explain
from gradus.diagnosis.finding import Finding
from gradus.diagnosis.rules import kernels
from gradus.diagnosis.timeline.analysis import TraceAnalysis
from gradus.diagnosis.timeline.trace_analysis import KernelTotal
from gradus.record.directory import RunDirectory
from gradus.schema.prediction import MemoryPrediction, Prediction, StepPrediction

SOUND = {"precision": "bf16", "compile": True}
MANY = {"micro_batch": 1, "accumulate": 32, "precision": "bf16"}
RESNET = {
    "model": {"use": "resnet50", "classes": 10},
    "data": {"use": "synthetic-images", "size": 224, "samples": 256},
}


def found_in(run: RunDirectory) -> dict[str, Finding]:
    return {one.id: one for one in explain(Evidence.of_run(run)).findings}


def on_gpu(folder: Any, **given: Any) -> dict[str, Finding]:
    return found_in(run_with(folder, **{"cluster": ON_GPU, "gpu": {}, "plan": SOUND, **given}))


def traced(**of_trace: Any) -> TraceAnalysis:
    """A second of steps on a GPU that computes all the time."""
    plain: dict[str, Any] = dict.fromkeys(TraceAnalysis.__dataclass_fields__)
    zero = {name: 0.0 for name in plain if name.endswith("_seconds")}
    usual = {"path": "t", "rank": 0, "device": "cuda", "steps": 10, "span_seconds": 1.0, "busy_seconds": 1.0}
    usual |= {"kernels": 5000, "small_kernels": 10, "small_kernel_share": 0.01, "truncated": False}
    usual |= {"syncs": (), "top_kernels": (), "collectives": (), "phase_seconds": {}, "not_measured": ()}
    return TraceAnalysis(**{**plain, **zero, **usual, **of_trace})


def with_traces(run: RunDirectory, *traces: TraceAnalysis) -> Evidence:
    evidence = Evidence.of_run(run)
    evidence.__dict__["traces"] = traces  # as if they had been read
    return evidence


# -- numbers and kernels


def test_fp32_on_a_gpu_that_has_bf16(tmp_path):
    found = on_gpu(tmp_path, plan={"precision": "fp32"})
    one = found["fp32"]
    assert one.change.startswith("--set plan.precision=bf16")
    assert 0.5 < one.gain_at_most < 0.9  # never above what forward and backward take


def test_fp32_on_a_cpu_is_no_finding(tmp_path):
    assert not found_in(run_with(tmp_path, plan={"precision": "fp32"}))
    start = {"event": "start", "step": 0, "device": "cpu", "threads": 1}  # though the machine has a GPU
    assert "fp32" not in on_gpu(tmp_path, plan={"precision": "fp32"}, events=[start], run_id="y")


def test_convolutions_in_the_slow_layout(tmp_path):
    assert on_gpu(tmp_path, recipe=RESNET)["channels-last"].change == "--set plan.channels_last=true"
    fast = {**SOUND, "channels_last": True}
    assert "channels-last" not in on_gpu(tmp_path, recipe=RESNET, plan=fast, run_id="y")


def test_tiny_kernels_in_a_trace(tmp_path):
    run = run_with(tmp_path, cluster=ON_GPU, gpu={}, plan={**SOUND, "compile": False})
    launches = KernelTotal("add_kernel", "compute", 4000, 0.1)
    trace = traced(launch_starved_seconds=0.5, busy_seconds=0.5, small_kernel_share=0.6, top_kernels=(launches,))
    one = kernels.small_kernels(with_traces(run, trace))
    assert one is not None
    assert one.change.startswith("--set plan.compile=true")
    assert one.gain_at_most == pytest.approx(0.8)
    assert kernels.small_kernels(with_traces(run, traced())) is None


def test_a_host_that_only_its_profiler_slows_down(tmp_path):
    """Steps that were not recorded take as long as the device is busy in those that were."""
    run = run_with(tmp_path, cluster=ON_GPU, gpu={}, plan={**SOUND, "compile": False})
    trace = traced(span_seconds=3.0, busy_seconds=1.0, launch_starved_seconds=2.0, small_kernel_share=0.1)
    assert kernels.small_kernels(with_traces(run, trace)) is None


def test_matrix_products_beside_the_tensor_cores(tmp_path):
    odd = {"model": {"use": "gpt", "layers": 2, "width": 60, "heads": 4, "context": 64}}
    run = run_with(tmp_path, cluster=ON_GPU, gpu={}, plan=SOUND, recipe=odd)
    trace = traced(matmul_seconds=0.6, matmul_off_tensor_cores_seconds=0.5)
    one = kernels.no_tensor_cores(with_traces(run, trace))
    assert one is not None
    assert one.change == "--set model.width=64"
    assert one.gain_at_most == pytest.approx(0.5)
    on = traced(matmul_seconds=0.6, matmul_off_tensor_cores_seconds=0.01)
    assert kernels.no_tensor_cores(with_traces(run, on)) is None


def test_short_steps_on_an_idle_gpu_without_a_trace(tmp_path):
    tiny = {"forward": 0.001, "backward": 0.002, "optimizer": 0.001}
    one = on_gpu(tmp_path, seconds=tiny, gpu={"utilisation": 0.2})["small-kernels"]
    assert one.confidence == "low"
    assert "--profile" in one.not_measured[0]


# -- memory


def test_memory_that_is_never_used_while_micro_batches_are_small(tmp_path):
    found = on_gpu(tmp_path, plan=MANY, memory_reserved_bytes=10 * GIB, memory_peak_bytes=9 * GIB)
    one = found["memory-headroom"]
    assert one.change == "--set plan.micro_batch=8 --set plan.accumulate=4"  # 8 × 10 GiB are below 0.8 × 140
    assert one.severity == "waste"


def test_a_full_micro_batch_leaves_nothing_to_enlarge(tmp_path):
    assert not on_gpu(tmp_path, memory_reserved_bytes=10 * GIB, memory_peak_bytes=9 * GIB)


def test_what_the_planner_chose_itself_is_not_second_guessed(tmp_path):
    small = {"memory_reserved_bytes": 10 * GIB, "memory_peak_bytes": 9 * GIB}
    assert not on_gpu(tmp_path, planned={"micro_batch": 1, "accumulate": 32}, **small)


def test_recomputing_what_there_would_be_room_for(tmp_path):
    plan = {**SOUND, "recompute": "full"}
    one = on_gpu(tmp_path, plan=plan)["needless-recompute"]
    assert one.gain_at_most == pytest.approx(0.3)  # the forward pass that is made twice
    full = {"memory_reserved_bytes": 120 * GIB, "memory_peak_bytes": 118 * GIB}
    assert not on_gpu(tmp_path, plan=plan, run_id="y", **full)


def test_recomputing_some_blocks_for_which_there_would_be_room(tmp_path):
    one = on_gpu(tmp_path, plan={**SOUND, "recompute": "full", "recompute_blocks": 3})["needless-recompute"]
    assert "(recompute: full in 3 blocks)" in one.verdict
    assert one.change == "--set plan.recompute=none --set plan.recompute_blocks=null"


@pytest.mark.parametrize(("recompute", "gain"), [(0.1, 0.1), (0.02, None), (0.5, 0.3)])
def test_a_few_blocks_gain_no_more_than_computing_them_again_was_to_take(tmp_path, recompute, gain):
    foreseen = Prediction(
        memory=MemoryPrediction(),
        peak_at="loss",
        limit_bytes=None,
        memory_error=0.04,
        step=StepPrediction(compute=1 - recompute, recompute=recompute),
        model_flops=1.0,
        hardware_flops=1.0,
        verdict="fits",
    )
    plan = {**SOUND, "recompute": "full", "recompute_blocks": 3}
    one = on_gpu(tmp_path, plan=plan, prediction=foreseen).get("needless-recompute")
    assert (one.gain_at_most if one else None) == (pytest.approx(gain) if gain else None)


def test_memory_that_is_nearly_all_taken(tmp_path):
    found = on_gpu(tmp_path, memory_reserved_bytes=137 * GIB, memory_peak_bytes=136 * GIB)
    assert found["near-memory-limit"].change == "--set plan.micro_batch=16 --set plan.accumulate=2"


def test_memory_in_pieces(tmp_path):
    held = {"memory_reserved_bytes": 125 * GIB, "memory_peak_bytes": 90 * GIB, "memory_retries": 7}
    one = on_gpu(tmp_path, **held)["fragmentation"]
    assert "expandable_segments" in one.change
    assert one.evidence["memory_retries"] == 7


# -- clocks and idle devices


def test_a_gpu_that_is_too_hot(tmp_path):
    hot = {"throttle": ("hardware thermal slowdown",), "clock_mhz": 990, "clock_max_mhz": 1980}
    hot |= {"temperature_celsius": 91.0}
    one = on_gpu(tmp_path, gpu=hot)["throttling"]
    assert one.gain_at_most == pytest.approx(0.5)
    assert one.evidence["temperature_celsius"] == 91.0


def test_a_gpu_at_its_full_power_is_what_was_paid_for(tmp_path):
    full = {"throttle": ("power cap",), "clock_mhz": 1500, "clock_max_mhz": 1980, "power_limit_watts": 700.0}
    assert not on_gpu(tmp_path, gpu=full)
    lowered = {**full, "power_limit_watts": 400.0, "clock_mhz": 1200}
    assert "throttling" in on_gpu(tmp_path, gpu=lowered, run_id="y")


def test_a_gpu_that_does_nothing_is_named(tmp_path):
    gpus = {"each": [{}, {"utilisation": 0.0, "processes": 0}]}
    one = on_gpu(tmp_path, gpu=gpus)["idle-gpu"]
    assert one.evidence["idle"] == ["n1:1"]
    assert one.gain_at_most is None
