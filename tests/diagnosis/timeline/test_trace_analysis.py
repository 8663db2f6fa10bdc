"""Synthetic traces of a GPU and of a CPU, with known answers. Times are in microseconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_traces import ADD, ALL_REDUCE, GEMM, TALK, Trace

from gradus.diagnosis.timeline.analysis import TraceAnalysis, analyse
from gradus.diagnosis.timeline.kernel_kinds import is_matmul, kind_of, uses_tensor_cores


def analysed(trace: Trace, folder: Path) -> TraceAnalysis:
    found = analyse(trace.write(folder / "trace.json.gz"))
    idle = (
        found.launch_starved_seconds + found.data_wait_seconds + found.sync_blocked_seconds + found.idle_other_seconds
    )
    assert idle == pytest.approx(found.idle_seconds, abs=1e-9)
    assert found.busy_seconds + found.idle_seconds == pytest.approx(found.span_seconds, abs=1e-9)
    return found


def micro(value: float) -> object:
    return pytest.approx(value * 1e-6, abs=1e-9)


def test_kernels_side_by_side_are_busy_once(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 1000)
    trace.kernel(GEMM, 100, 500, launched=50)
    trace.kernel(ADD, 300, 700, launched=60, stream=8)
    found = analysed(trace, tmp_path)
    assert found.device == "cuda"
    assert found.device_name == "NVIDIA H200"
    assert found.span_seconds == micro(1000)
    assert found.busy_seconds == found.compute_seconds == micro(600)


def test_exposed_communication_is_what_no_computation_hides(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 1000)
    trace.kernel(GEMM, 0, 400, launched=0)
    trace.kernel(ALL_REDUCE, 200, 700, launched=10, stream=TALK)
    trace.kernel(GEMM, 600, 1000, launched=20)
    found = analysed(trace, tmp_path)
    assert found.communication_seconds == micro(500)
    assert found.exposed_communication_seconds == micro(200)
    assert found.overlap == pytest.approx(0.6)
    assert found.idle_seconds == micro(0)


def test_without_communication_there_is_no_overlap_to_speak_of(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 100)
    trace.kernel(GEMM, 0, 90, launched=0)
    assert analysed(trace, tmp_path).overlap is None


def test_a_device_that_waits_for_a_busy_host_is_launch_starved(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 1000)
    for start in range(0, 1000, 100):  # each operator takes 90, and its kernel 20
        trace.op("aten::add", start, start + 90)
        trace.kernel(ADD, start + 80, start + 100, launched=start + 70)
    found = analysed(trace, tmp_path)
    assert found.launch_starved_seconds == micro(800)
    assert found.median_gap_seconds == micro(80)


def test_a_gap_within_a_wait_for_data_is_the_datas(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 1000)
    trace.mark("gradus:data", 0, 600)
    trace.op("aten::mm", 600, 700)
    trace.kernel(GEMM, 700, 1000, launched=690)
    found = analysed(trace, tmp_path)
    assert found.data_wait_seconds == micro(600)
    assert found.launch_starved_seconds == micro(100)
    assert found.phase_seconds == {"data": micro(600)}


def test_torchs_own_mark_of_a_loader_counts_as_data(tmp_path: Path) -> None:
    trace = Trace()
    trace.mark("ProfilerStep#3", 0, 1000)
    trace.mark("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 400)
    trace.kernel(GEMM, 400, 1000, launched=399)
    found = analysed(trace, tmp_path)
    assert found.steps == 1
    assert found.data_wait_seconds == micro(400)


def test_a_wait_for_data_while_the_device_works_costs_nothing(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 1000)
    trace.mark("gradus:data", 100, 600)
    trace.kernel(GEMM, 0, 1000, launched=0)
    assert analysed(trace, tmp_path).data_wait_seconds == 0


def test_a_device_that_ran_empty_because_the_host_waited_is_blocked_by_the_sync(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 1000)
    trace.kernel(GEMM, 0, 400, launched=0)
    trace.op("aten::item", 10, 410)
    trace.op("aten::_local_scalar_dense", 11, 409)
    trace.copy("Memcpy DtoH (Device -> Pinned)", 400, 402, launched=12)
    trace.runtime("cudaStreamSynchronize", 14, 408)
    trace.op("aten::mm", 500, 560)
    trace.kernel(GEMM, 600, 1000, launched=550)
    found = analysed(trace, tmp_path)
    assert found.sync_blocked_seconds == micro(198)
    assert found.launch_starved_seconds == 0
    (sync,) = found.syncs
    assert (sync.name, sync.count, sync.per_step) == ("aten::item", 1, 1.0)
    assert sync.seconds == micro(394)
    assert sync.file is None


def test_a_gap_whose_kernel_was_launched_long_before_is_neither(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 1000)
    trace.op("aten::mm", 0, 1000)
    trace.kernel(GEMM, 0, 400, launched=0)
    trace.kernel(GEMM, 500, 1000, launched=10)
    assert analysed(trace, tmp_path).idle_other_seconds == micro(100)


def test_gaps_between_queued_kernels_are_not_laid_to_a_host_that_waits(tmp_path: Path) -> None:
    """A host that runs ahead waits for data or for the device while the device works through what it was given."""
    trace = Trace()
    trace.step(0, 1000)
    for number in range(10):
        trace.kernel(GEMM, 100 * number, 100 * number + 98, launched=number)
    trace.mark("gradus:data", 20, 300)
    trace.runtime("cudaEventSynchronize", 300, 990)
    found = analysed(trace, tmp_path)
    assert found.data_wait_seconds == found.sync_blocked_seconds == found.launch_starved_seconds == 0
    assert found.idle_other_seconds == micro(18 + 2)


def test_a_host_that_is_not_in_torch_starves_nobody_of_launches(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 10_000)
    trace.kernel(GEMM, 0, 1000, launched=0)
    trace.op("aten::mm", 8990, 9100)  # before it, eight milliseconds of somebody's Python
    trace.kernel(GEMM, 9000, 10_000, launched=8995)
    found = analysed(trace, tmp_path)
    assert found.idle_other_seconds == micro(7990)
    assert found.launch_starved_seconds == micro(10)


def test_steps_on_a_device_that_runs_behind_are_as_long_as_on_the_device(tmp_path: Path) -> None:
    trace = Trace()
    trace.kernel(GEMM, -500, 800, launched=-900)  # of the step before
    trace.step(0, 1000)
    trace.step(1000, 2000)
    trace.kernel(GEMM, 800, 1800, launched=100)
    trace.kernel(GEMM, 1800, 2800, launched=1100)
    found = analysed(trace, tmp_path)
    assert found.steps == 2
    assert found.span_seconds == micro(2000)
    assert found.busy_seconds == micro(2000)


def test_small_kernels_and_tensor_cores_are_counted(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 1000)
    trace.kernel(GEMM, 0, 300, launched=0)
    trace.kernel("ampere_sgemm_128x64_nn", 300, 500, launched=1)
    for start in range(500, 540, 4):
        trace.kernel(ADD, start, start + 4, launched=2)
    found = analysed(trace, tmp_path)
    assert (found.kernels, found.small_kernels) == (12, 10)
    assert found.small_kernel_share == pytest.approx(40 / 540)
    assert found.matmul_seconds == micro(500)
    assert found.tensor_core_seconds == micro(300)
    assert found.matmul_off_tensor_cores_seconds == micro(200)
    assert found.top_kernels[0].name == GEMM
    assert found.top_kernels[0].tensor_cores is True


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off", True),
        ("cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4", True),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>", True),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64, 4, false, false, cutlass::bfloat16_t>>", True),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4", True),
        ("ampere_sgemm_128x64_nn", False),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>", False),
        ("ampere_scudnn_128x64_relu_medium_nn_v1", False),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>", False),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>", False),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", None),
        ("void splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>", None),
    ],
)
def test_names_of_kernels_tell_whether_they_use_tensor_cores(name: str, expected: bool | None) -> None:
    assert uses_tensor_cores(name) is expected
    assert is_matmul(name) is (expected is not None)
    assert kind_of(name) == "compute"


def test_a_cpus_work_is_torchs_operators_and_gloo_talks(tmp_path: Path) -> None:
    trace = Trace(distributedInfo={"backend": "gloo", "rank": 1, "world_size": 2})
    trace.step(0, 1000)
    trace.mark("gradus:data", 0, 200)
    trace.op("aten::stack", 50, 100)  # a batch is put together in the thread that trains: data, too
    trace.op("aten::mm", 200, 500)
    trace.op("aten::addmm", 210, 490)
    trace.mark("gloo:all_reduce", 400, 800, thread=201)
    trace.op("aten::copy_", 300, 700, thread=300)  # somebody else's thread
    trace.op("aten::add_", 800, 900)
    found = analysed(trace, tmp_path)
    assert (found.device, found.rank, found.world_size) == ("cpu", 1, 2)
    assert found.compute_seconds == micro(400)
    assert found.communication_seconds == micro(400)
    assert found.exposed_communication_seconds == micro(300)
    assert found.data_wait_seconds == micro(200)
    assert found.idle_other_seconds == micro(100)
    assert found.matmul_seconds == micro(300)
    assert [one.name for one in found.collectives] == ["gloo:all_reduce"]
    assert any("no GPU" in line for line in found.not_measured)


def test_a_trace_without_marks_is_one_step_and_says_so(tmp_path: Path) -> None:
    trace = Trace()
    trace.op("aten::mm", 0, 300)
    trace.op("aten::mm", 400, 500)
    found = analysed(trace, tmp_path)
    assert found.steps == 1
    assert found.span_seconds == micro(500)
    assert any("single steps" in line for line in found.not_measured)
