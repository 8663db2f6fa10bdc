"""One real Slurm for each test process, as clean before each test as it was at its start."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from slurm.lab import Lab, NoCgroups, missing


@pytest.fixture(scope="session")
def _opened_lab() -> Iterator[Lab]:
    yield from _opened("linuxproc")


@pytest.fixture(scope="session")
def _opened_cgroup_lab() -> Iterator[Lab]:
    yield from _opened("cgroup")


def _opened(proctrack: str) -> Iterator[Lab]:
    if (reason := missing()) and os.geteuid() != 0:
        pytest.skip(reason)  # root can install it: there it is a failure
    lab = Lab(proctrack=proctrack)
    try:
        lab.open()
    except NoCgroups as reason_of_the_machine:
        pytest.skip(str(reason_of_the_machine))
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture
def lab(_opened_lab: Lab) -> Iterator[Lab]:
    yield _opened_lab
    _opened_lab.clear()


@pytest.fixture
def cgroup_lab(_opened_cgroup_lab: Lab) -> Iterator[Lab]:
    """Its steps are tracked by cgroups, as at most sites: signals reach other processes than in `lab`."""
    yield _opened_cgroup_lab
    _opened_cgroup_lab.clear()
