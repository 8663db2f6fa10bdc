import re
import subprocess
import sys
from importlib import metadata

import pytest

from gradus.hardware.detect import DetectedGpu, Machine
from gradus.hardware.torch_build import TorchBuild, check_torch_can_use, has_kernels, installed_torch, read_build
from gradus.schema.errors import InputError


def machine(driver_cuda=(13, 0), capability=(9, 0), driver="580.65.06", name="NVIDIA H200"):
    gpu = DetectedGpu(0, name, 150_000_000_000, capability, "GPU-0")
    return Machine("node-1", 8, 2**34, (gpu,), driver, driver_cuda)


def refusal(machine, build):
    with pytest.raises(InputError) as refused:
        check_torch_can_use(machine, build)
    return refused.value


CPU_ONLY = TorchBuild("2.13.0+cpu")


def test_the_installed_torch_is_read_without_importing_it():
    code = (
        "import sys; from gradus.hardware.torch_build import installed_torch; print(installed_torch().version);"
        "assert 'torch' not in sys.modules"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == installed_torch().version
    assert printed.startswith(metadata.version("torch").partition("+")[0])


def test_a_cuda_build_is_recognised(tmp_path):
    file = tmp_path / "version.py"
    file.write_text(
        "__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    assert read_build(file) == TorchBuild("2.13.0+cu130", cuda="13.0")


@pytest.mark.parametrize(
    ("driver_cuda", "capability", "wheel"),
    [
        ((13, 1), (9, 0), "torch 2.13.0 wheel built for CUDA 13.0 (the `cu130` build)"),
        ((13, 0), (9, 0), "`cu130`"),
        ((12, 9), (9, 0), "`cu129`"),
        ((12, 8), (10, 0), "`cu128`"),
        ((12, 7), (9, 0), "`cu126`"),
        ((12, 2), (8, 0), "`cu126`"),  # older than the build, but of its major version: it runs
        ((13, 0), (7, 0), "`cu126`"),  # later builds have no code for Volta
        ((12, 6), (12, 0), "`cu128`"),  # earlier builds have no code for Blackwell
    ],
)
def test_gpus_with_a_cpu_only_torch_are_refused_with_the_build_to_install(driver_cuda, capability, wheel):
    refused = refusal(machine(driver_cuda, capability), CPU_ONLY)
    assert "CPU-only" in refused.message
    assert "NVIDIA H200" in refused.message
    assert wheel in refused.hint
    assert 'CUDA_VISIBLE_DEVICES=""' in refused.hint


def test_a_driver_too_old_for_any_build_is_told_which_driver_it_takes():
    refused = refusal(machine((11, 4), (8, 0), "470.82.01"), CPU_ONLY)
    assert "driver 470.82.01 is too old" in refused.hint
    assert "525.60.13 or newer" in refused.hint


def test_a_torch_built_for_another_vendor_is_refused():
    assert "ROCm 6.4" in refusal(machine(), TorchBuild("2.13.0+rocm6.4", hip="6.4")).message


def test_a_torch_newer_than_the_driver_by_a_major_version_is_refused():
    refused = refusal(machine((12, 8), driver="570.1"), TorchBuild("2.13.0+cu130", cuda="13.0"))
    assert "driver 570.1 supports CUDA 12.8 at most" in refused.message
    assert "`cu128`" in refused.hint


def test_a_torch_without_kernels_for_the_gpu_is_refused():
    build = TorchBuild("2.13.0+cu130", cuda="13.0", architectures=("sm_75", "sm_80", "sm_90"))
    refused = refusal(machine(capability=(7, 0), name="Tesla V100-SXM2-32GB"), build)
    assert "no kernels for Tesla V100-SXM2-32GB (compute capability 7.0)" in refused.message
    assert "`cu126`" in refused.hint


@pytest.mark.parametrize(
    ("here", "build"),
    [
        (machine(), TorchBuild("2.13.0+cu130", cuda="13.0")),
        (machine((12, 2)), TorchBuild("2.13.0+cu126", cuda="12.6", architectures=("sm_80", "sm_90"))),
        (Machine("laptop", 8, 2**34), CPU_ONLY),
    ],
)
def test_a_torch_that_fits_passes(here, build):
    check_torch_can_use(here, build)


def test_a_driver_that_does_not_answer_is_never_a_silent_cpu_run():
    broken = Machine("node-1", 8, 2**34, problems=("the NVIDIA driver does not answer: version mismatch",))
    assert "does not answer" in refusal(broken, CPU_ONLY).message


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 6), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_80",), False),
        ((9, 0), ("compute_80",), True),
        ((12, 0), ("sm_90", "compute_90"), True),
        ((9, 0), ("sm_90a",), True),
        ((10, 0), ("compute_90a",), False),
        ((10, 3), ("sm_100",), True),
        ((10, 3), ("sm_100f",), True),
        ((10, 3), ("sm_100a",), False),
        ((9, 0), (), False),
    ],
)
def test_which_code_runs_on_which_gpu(capability, architectures, runs):
    assert has_kernels(capability, architectures) is runs


def test_the_texts_name_no_site():
    for driver_cuda in ((11, 0), (12, 6), (13, 0), None):
        refused = refusal(machine(driver_cuda), CPU_ONLY)
        assert not re.search(r"https?:|www\.|\.org|\.com", refused.message + refused.hint)
