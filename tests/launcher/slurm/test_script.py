"""The batch script: readable, and nothing that a user wrote becomes a command in it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gradus.launcher.slurm.script import ScriptInputs, network_variables, node_tasks, render
from gradus.schema.cluster import Network
from gradus.schema.errors import InputError
from gradus.schema.loading import validated

NASTY = ["a b", "it's", '"quoted"', "$(touch canary)", "`touch canary`", "; touch canary", "$HOME", "\\", "*", "é"]


def inputs(**changes: object) -> ScriptInputs:
    plain = ScriptInputs(
        title="run own/1",
        runs=("/shared/runs/own/1",),
        header=("--job-name=own", "--nodes=2"),
        python="/opt/venv/bin/python",
        srun_options=tuple(node_tasks(2)),
    )
    return ScriptInputs(**{**plain.__dict__, **changes})  # type: ignore[arg-type]


def up_to(text: str, mark: str) -> str:
    return text[: text.index(mark)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"preflight": True},
        {"runs": ("/r/a", "/r/b")},
        {"ranks_by_mpi": ("srun", "--mpi=pmix", "--ntasks=4")},
        {"prefix": ("ch-run", "/images/torch", "--")},
        {"variables": (("NCCL_IB_HCA", "mlx5"),), "environment": ("module purge",)},
    ],
)
def test_every_form_is_a_script_that_a_shell_can_read(changes: dict[str, object]) -> None:
    text = render(inputs(**changes))
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=own\n#SBATCH --nodes=2\n#\n")
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    assert "{{" not in text
    assert "{%" not in text
    assert all(len(line) <= 200 for line in text.splitlines())


def test_paths_values_and_options_are_words_whatever_is_in_them(tmp_path: Path) -> None:
    folder = str(tmp_path / " ".join(NASTY).replace("/", "_"))
    variables = tuple((f"V{number}", value) for number, value in enumerate(NASTY))
    text = render(inputs(title="\n".join(NASTY), runs=(folder,), variables=variables, prefix=tuple(NASTY)))
    header = up_to(text, "job() {")
    shown = "; ".join(f'printf "%s\\n" "$V{number}"' for number in range(len(NASTY)))
    done = subprocess.run(
        ["bash"],
        input=f'{header}\nprintf "%s\\n" "$run"; {shown}\n',
        text=True,
        capture_output=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "SLURM_CPUS_ON_NODE": "1"},
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [folder, *NASTY]
    assert list(tmp_path.iterdir()) == [], "no canary"


def test_the_words_before_a_nodes_command_arrive_as_they_are(tmp_path: Path) -> None:
    """`srun` is a program of ours here, which shows what it was given."""
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    text = render(inputs(prefix=tuple(NASTY)))
    function = text[text.index("on_each_node() {") : text.index("while true; do\n  # The next")]
    done = subprocess.run(
        ["bash"],
        input=f"{function}\non_each_node python -m node 'a b'\n",
        text=True,
        capture_output=True,
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
    ignoring = ["bash", "-c", 'trap "" TERM USR1; exec "$@"', "node"]
    assert done.stdout.split("\0")[:-1] == [*node_tasks(2), *ignoring, *NASTY, "python", "-m", "node", "a b"]


@pytest.mark.parametrize(
    ("process", "code"),
    [
        ("sleep 0.5; exit 7", 7),  # it ends while the shell answers the signal
        ("sleep 2; exit 7", 7),
        ("sleep 0.5; exit 0", 0),
        ("kill -9 $BASHPID", 137),
    ],
)
def test_a_signal_does_not_take_the_place_of_a_processs_own_code(process: str, code: int) -> None:
    text = render(inputs())
    function = text[text.index("finish() {") : text.index("# A task of its own")]
    signal = "(sleep 0.2; kill -USR1 $$) &"
    script = f"trap 'sleep 1' USR1\n{function}\n( {process} ) & child=$!\n{signal}\nfinish $child; echo $?\n"
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, timeout=60)
    assert done.stdout == f"{code}\n", done.stderr


def test_each_task_of_an_array_has_a_run_of_its_own() -> None:
    text = up_to(render(inputs(runs=("/r/first one", "/r/second"))), "exec >>")
    done = subprocess.run(
        ["bash"], input=f'{text}\necho "$run"', text=True, capture_output=True, env={"SLURM_ARRAY_TASK_ID": "1"}
    )
    assert done.stdout == "/r/second\n"


def test_the_network_is_what_the_cluster_file_says_and_nothing_else() -> None:
    assert network_variables(Network()) == ()
    assert network_variables(Network(interface="ib0", variables={"NCCL_IB_HCA": "mlx5_0"})) == (
        ("NCCL_SOCKET_IFNAME", "ib0"),
        ("GLOO_SOCKET_IFNAME", "ib0"),
        ("NCCL_IB_HCA", "mlx5_0"),
    )


@pytest.mark.parametrize("wrong", [{"interface": "ib0; rm"}, {"variables": {"a b": "1"}}, {"variables": {"X": 1}}])
def test_a_name_that_is_none_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        validated(Network, wrong, "cluster.yaml")
