"""Slurm's lists of nodes. The expected names are what `scontrol show hostnames` of 22.05 prints."""

import pytest

from gradus.launcher.slurm.host_list import expanded


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1,3-4],login", ["n1", "n3", "n4", "login"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("r[1-2]c[1-2]", ["r1c1", "r1c2", "r2c1", "r2c2"]),
        ("a-b-[001,010].cluster", ["a-b-001.cluster", "a-b-010.cluster"]),
        ("", []),
    ],
)
def test_a_list_is_taken_apart_as_slurm_does(text: str, names: list[str]) -> None:
    assert expanded(text) == names
