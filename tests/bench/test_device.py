"""A device is measured in all that it can do; what it cannot do is said, and is never zero."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from gradus.bench.device import Measure, _row, bench_device, pcie_quoted, product
from gradus.bench.interleaved import Spread
from gradus.cli.main import app


def test_a_cpu_has_rates_by_type_and_of_its_memory_and_lacks_fp8():
    result = bench_device(torch.device("cpu"), size=64, memory_mib=1, seconds=0.003, rounds=2)
    rates = {(row["group"], row["name"]): row["value"] for row in result.rows}
    for name in ("fp64", "fp32", "bf16"):
        assert rates["matmul", name] > 0
    assert rates["memory", "copy (1 read, 1 write)"] > 0
    assert rates["launch", "call of an operator"] > 0
    assert rates["matmul", "fp8"] is None
    assert any("fp8: not measured: " in note for note in result.notes)
    assert all(row["value"] != 0 and row["quoted"] is None for row in result.rows)
    assert all(part[1] > 0 for bars in result.charts for _, parts in bars.rows for part in parts)


def test_rates_follow_from_the_seconds_of_a_call_and_shares_from_what_is_quoted():
    measure = Measure("matmul", "bf16", "TFLOP/s", 2.0, lambda: None, quoted=800.0, source="a datasheet")
    row = _row(measure, Spread((0.005, 0.004, 0.01)))
    assert (row.value, row.quoted, row.share) == (pytest.approx(400.0), 800.0, pytest.approx(0.5))
    latency = _row(Measure("launch", "a", "µs", 200, lambda: None), Spread((0.001,)))
    assert latency.value == pytest.approx(5.0)


def test_products_are_products():
    assert product("fp32", 16, torch.device("cpu"))().shape == (16, 16)
    assert product("int8", 32, torch.device("cpu"))().dtype == torch.int32


class FakeNvml:
    """A driver with one GPU on PCIe 5.0 x16; `fails` makes it say nothing."""

    def __init__(self, generation: int = 5, fails: bool = False) -> None:
        self.generation, self.fails = generation, fails

    def nvmlInit(self) -> None:
        if self.fails:
            raise OSError("no driver")

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return self.generation

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16


def test_a_link_is_quoted_as_the_driver_reports_it_and_not_at_all_where_it_does_not():
    quoted, source = pcie_quoted(0, FakeNvml())
    assert quoted == pytest.approx(63.0, abs=0.1)
    assert source == "PCIe 5.0 x16 as the driver reports it"
    assert pcie_quoted(0, FakeNvml(generation=99)) == (None, None)
    assert pcie_quoted(0, FakeNvml(fails=True)) == (None, None)


@pytest.mark.parametrize(("arguments", "found"), [(["--size", "100"], "multiple of 16"), (["--gpu", "9"], "--gpu")])
def test_bad_input_is_refused(arguments, found):
    done = CliRunner().invoke(app, ["bench", "device", *arguments])
    assert done.exit_code == 2, done.output
    assert found in done.output
