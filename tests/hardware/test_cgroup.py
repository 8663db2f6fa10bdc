import pytest

from gradus.hardware.cgroup import cpu_quota, memory_left, memory_limit


@pytest.fixture
def machine(tmp_path):
    """A tree of control groups as the kernel would show it, from a dict of files."""

    def build(groups: str, files: dict[str, str]):
        (tmp_path / "groups").write_text(groups)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "groups", tmp_path / "cgroup"

    return build


def test_the_tightest_limit_on_the_way_up_counts(machine):
    places = machine(
        "0::/slurm/job_1/step_0\n",
        {
            "slurm/job_1/step_0/cpu.max": "max 100000\n",
            "slurm/job_1/cpu.max": "250000 100000\n",
            "slurm/cpu.max": "800000 100000\n",
            "slurm/job_1/step_0/memory.max": "max\n",
            "slurm/job_1/memory.max": "1000000\n",
            "slurm/memory.max": "2000000\n",
        },
    )
    assert cpu_quota(*places) == 2.5
    assert memory_limit(*places) == 1_000_000


def test_version_1_keeps_a_tree_for_each_controller(machine):
    places = machine(
        "5:memory:/job\n4:cpu,cpuacct:/job\n0::/\n",
        {
            "cpu,cpuacct/job/cpu.cfs_quota_us": "400000\n",
            "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "memory/job/memory.limit_in_bytes": "5000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert cpu_quota(*places) == 4.0
    assert memory_limit(*places) == 5000


def test_what_is_left_is_the_least_on_the_way_up_and_caches_count_as_free(machine):
    places = machine(
        "0::/slurm/job_1\n",
        {
            "slurm/job_1/memory.max": "1000\n",
            "slurm/job_1/memory.current": "900\n",
            "slurm/job_1/memory.stat": "anon 500\ninactive_file 300\n",
            "slurm/memory.max": "2000\n",
            "slurm/memory.current": "1950\n",
        },
    )
    assert memory_left(*places) == 50
    (places[1] / "slurm/memory.max").write_text("max\n")
    assert memory_left(*places) == 400


def test_what_is_left_under_version_1(machine):
    files = {
        "limit_in_bytes": "5000\n",
        "usage_in_bytes": "4000\n",
        "stat": "inactive_file 7\ntotal_inactive_file 70\n",
    }
    places = machine("5:memory:/job\n", {f"memory/job/memory.{name}": text for name, text in files.items()})
    assert memory_left(*places) == 1070


def test_in_a_container_the_limits_of_the_mounted_top_count(machine):
    places = machine("0::/somewhere/outside\n", {"cpu.max": "150000 100000\n", "memory.max": "700\n"})
    assert cpu_quota(*places) == 1.5
    assert memory_limit(*places) == 700


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert cpu_quota(tmp_path / "none", tmp_path) is None
    assert memory_limit(tmp_path / "none", tmp_path) is None
