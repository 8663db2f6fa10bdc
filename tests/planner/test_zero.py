"""The published ZeRO formulas, against the published numbers of a BERT with 192 layers."""

import pytest

from gradus.planner.zero import number_bytes, zero_bytes

BERT = 2_472_627_289
GIB = 2**30


def test_zero_1_over_two_ranks_is_what_the_lab_logged():
    found = zero_bytes(BERT, 1, 2, low=2, high=4)
    assert (found.parameters + found.optimizer) / GIB == pytest.approx(18.4225, abs=5e-5)
    assert f"{(found.parameters + found.optimizer) / GIB:.2f}" == "18.42"


def test_fp32_adam_on_one_rank_is_more_than_a_gpu_of_32_gib_has():
    found = zero_bytes(BERT, 0, 1, low=4, high=4)
    assert found.total == 16 * BERT
    assert found.total / GIB == pytest.approx(36.845, abs=5e-4)
    assert f"{found.total / GIB:.2f}" in ("36.84", "36.85")


@pytest.mark.parametrize(
    ("zero", "parameters", "optimizer", "gradients"),
    [(0, 2, 12, 2), (1, 2, 3, 2), (2, 2, 3, 0.5), (3, 0.5, 3, 0.5)],
)
def test_each_stage_divides_one_more_kind_over_four_ranks(zero, parameters, optimizer, gradients):
    found = zero_bytes(1000, zero, 4, low=2, high=4)
    per_parameter = [part / 1000 for part in (found.parameters, found.optimizer, found.gradients)]
    assert per_parameter == [parameters, optimizer, gradients]
    assert found.total == found.parameters + found.master + found.moments + found.gradients
    assert found.master * 2 == found.moments


def test_gradients_may_be_kept_in_the_high_precision():
    assert zero_bytes(1000, 1, 4, gradient=4).gradients == 4000
    assert zero_bytes(1000, 2, 4, gradient=4).gradients == 1000


def test_the_published_16_bytes_for_each_parameter_in_mixed_precision():
    """ZeRO's own example: 7.5 B parameters over 64 ranks need 120, 31.4, 16.6 and 1.9 GB."""
    sizes = [zero_bytes(7_500_000_000, zero, 64).total / 1e9 for zero in range(4)]
    assert [round(size, 1) for size in sizes] == [120.0, 31.4, 16.6, 1.9]


def test_where_parameters_have_the_high_precision_there_is_no_master_copy():
    for precision in ("fp32", "tf32", "fp64"):
        low, high = number_bytes(precision)
        assert zero_bytes(10, 3, 2, low=low, high=high).master == 0
    for precision in ("bf16", "fp16", "fp8"):
        low, high = number_bytes(precision)
        assert zero_bytes(10, 3, 2, low=low, high=high).master == 20
