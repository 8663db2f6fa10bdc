"""Why a run is dead, from what it left: the first finding names the cause and the exact change."""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnosis.dead_runs import findings, first, of_rank, written_run

from gradus.checkpoint.part import COMMITTED
from gradus.checkpoint.step_folder import step_name

TRACEBACK = """
Traceback (most recent call last):
  File "/home/ada/train.py", line 31, in <module>
    main()
  File "/home/ada/train.py", line 17, in main
    {code}
  File "/opt/venv/lib/python3.12/site-packages/torch/nn/functional.py", line 99, in relu
    result = torch.relu(input)
{error}
"""

# What torch's caching allocator says, in the wording of 2.3 to 2.13.
GPU_IS_FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 1.20 GiB is free. Including non-PyTorch memory, this process has 77.90 GiB memory in use. Of the "
    "allocated memory 76.10 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)
GPU_IS_IN_PIECES = GPU_IS_FULL.replace("76.10", "60.10").replace("512.00 MiB", "16.00 GiB")
GPU_IS_SHARED = GPU_IS_FULL.replace(
    "this process has 77.90 GiB", "Process 4711 has 60.00 GiB memory in use. this process has 17.00 GiB"
)

SCRIPT = """
import torch
from torch.utils.data import DataLoader
train_loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=2)
for x, y in train_loader:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def raised(error: str, code: str = "x = relu(x)", rank: int = 0) -> dict[str, object]:
    """The error as a launcher leaves it of a script."""
    text = TRACEBACK.format(code=code, error=error).strip()
    return {"kind": "exception", "message": error, "traceback": text, "rank": rank, "node": "n1", "hint": None}


# -- out of memory -----------------------------------------------------------------------------------------------------


def test_a_recipe_out_of_memory_is_told_with_fixes_in_order_and_their_gib(tmp_path: Path) -> None:
    error = {
        "kind": "out-of-memory",
        "message": "out of memory in the backward pass: 70.0 GiB are in use, 2.0 GiB more were asked for\n  table",
        "hint": "--set plan.micro_batch=4",
        "binds": "activations",
        "rank": 0,
        "memory": {"limit_bytes": 80 << 30, "used_bytes": 70 << 30, "asked_bytes": 2 << 30, "parameters": 1 << 30},
        "changes": [
            {
                "set": {"plan.micro_batch": 4, "plan.accumulate": 8},
                "ranks": 1,
                "state_bytes": 10 << 30,
                "activation_bytes_at_least": 30 << 30,
            },
            {
                "set": {"plan.recompute": "full"},
                "ranks": 1,
                "state_bytes": 10 << 30,
                "activation_bytes_at_least": 4 << 30,
            },
        ],
    }
    found = first(written_run(tmp_path, error=error, ranks=1))
    assert (found.id, found.severity, found.gain_at_most) == ("out-of-memory", "fatal", None)
    assert found.evidence["binds"] == "activations"
    assert [fix["predicted_bytes"] for fix in found.evidence["fixes"]] == [40 << 30, 14 << 30]
    smaller = found.change.index("--set plan.micro_batch=4 --set plan.accumulate=8 (predicted: 40 GiB")
    assert smaller < found.change.index("--set plan.recompute=full (predicted: 14 GiB")


def test_a_script_out_of_gpu_memory_is_told_what_torch_says_and_the_line_of_its_batch(tmp_path: Path) -> None:
    found = first(written_run(tmp_path, error=raised(GPU_IS_FULL), script=SCRIPT))
    assert found.id == "out-of-memory"
    assert found.evidence["asked_bytes"] == 2 << 30
    assert found.evidence["limit_bytes"] == round(79.15 * 2**30)
    assert f"batch_size=64 at {tmp_path / 'train.py'}:4" in found.change


def test_the_wording_of_older_versions_is_understood(tmp_path: Path) -> None:
    said = (
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.75 GiB total capacity; 14.50 GiB "
        "already allocated; 38.50 MiB free; 14.75 GiB reserved in total by PyTorch)"
    )
    found = first(written_run(tmp_path, error=raised(said), script=SCRIPT)).evidence
    assert (found["limit_bytes"], found["allocated_bytes"]) == (round(15.75 * 2**30), round(14.5 * 2**30))
    assert (found["asked_bytes"], found["free_bytes"]) == (20 << 20, round(38.5 * 2**20))


def test_memory_in_pieces_is_told_from_memory_that_is_full(tmp_path: Path) -> None:
    found = first(written_run(tmp_path, error=raised(GPU_IS_IN_PIECES), script=SCRIPT))
    assert "fragmentation" in found.verdict
    assert "expandable_segments:True" in found.change


def test_memory_that_another_process_holds_is_not_blamed_on_the_model(tmp_path: Path) -> None:
    found = first(written_run(tmp_path, error=raised(GPU_IS_SHARED), script=SCRIPT))
    assert "another process holds 60 GiB" in found.verdict


@pytest.mark.parametrize(
    "said",
    [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 1099511627776 bytes. Error code 12 (Cannot allocate memory)",
        "MemoryError",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
)
def test_a_host_without_memory_is_told_from_a_gpu(tmp_path: Path, said: str) -> None:
    found = first(written_run(tmp_path, error=raised(said), script=SCRIPT))
    assert found.id == "out-of-memory"
    assert "host memory" in found.verdict
    assert "workers" in found.change


def test_a_loader_worker_that_was_killed_is_for_lack_of_memory(tmp_path: Path) -> None:
    said = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. "
    found = first(written_run(tmp_path, error=raised(said), ranks=1))
    assert found.id == "out-of-memory"
    assert "loader worker" not in found.change or "--set plan.workers=1" in found.change


# -- start-up ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
        "RuntimeError: Default process group has not been initialized, please make sure to call init_process_group.",
    ],
)
def test_a_missing_process_group_is_told_with_the_line_before_which_it_is_made(tmp_path: Path, said: str) -> None:
    found = first(written_run(tmp_path, error=raised(said, code="dist.all_reduce(x)"), script=SCRIPT))
    assert found.id == "no-process-group"
    assert 'init_process_group("gloo") before line 17 of /home/ada/train.py' in found.change
    assert "gradus train --nproc 2 -- train.py" in found.change


def test_a_missing_variable_of_a_launcher_is_told_with_the_command(tmp_path: Path) -> None:
    said = (
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, "
        "but not set"
    )
    found = first(written_run(tmp_path, error=raised(said), script=SCRIPT))
    assert found.id == "no-process-group"
    assert found.change.startswith("gradus train --nproc 2 -- train.py (or torchrun --nproc-per-node 2 train.py")


def test_an_import_error_on_one_node_names_the_node_and_the_package(tmp_path: Path) -> None:
    said = "ModuleNotFoundError: No module named 'cv2'"
    logs = {"n1": of_rank(0, "starts"), "n2": of_rank(1, TRACEBACK.format(code="import cv2", error=said))}
    found = first(written_run(tmp_path, error=raised(said, "import cv2", rank=1), logs=logs, script=SCRIPT))
    assert found.id == "import-error"
    assert found.evidence["module"] == "cv2"
    assert found.evidence["nodes"] == ["n2"]
    assert "on n2, and not on n1" in found.verdict
    assert "pip install opencv-python-headless on n2" in found.change


def test_an_import_error_on_all_ranks_is_told_so(tmp_path: Path) -> None:
    said = "ModuleNotFoundError: No module named 'einops'"
    both = of_rank(0, TRACEBACK.format(code="", error=said)) + of_rank(1, TRACEBACK.format(code="", error=said))
    found = first(written_run(tmp_path, error=raised(said), logs={"n1": both}, script=SCRIPT))
    assert "for all ranks" in found.verdict
    assert "pip install einops" in found.change


def test_a_module_that_lies_beside_the_script_is_found_there(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "helpers.py").write_text("")
    said = "ModuleNotFoundError: No module named 'helpers'"
    found = first(written_run(tmp_path, error=raised(said), script=SCRIPT))
    assert found.change.startswith(f"PYTHONPATH={tmp_path / 'src'}")


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_a_nan_with_fp16_asks_for_bf16_first_and_shows_the_loss_scales(tmp_path: Path) -> None:
    error = {
        "kind": "do-not-restart",
        "message": "the loss is nan at step 7; the last good step is 6, and there is no checkpoint yet. Samples of "
        "that step: positions 48 to 55 of the stream, dataset indices 1, 2",
        "step": 7,
        "last_good_step": 6,
        "sample_indices": [1, 2],
    }
    skipped = [
        {"event": "skipped-step", "step": step, "scale_before": 65536 / 2**step, "scale_after": 32768 / 2**step}
        for step in (1, 2)
    ]
    run = written_run(tmp_path, error=error, plan={"precision": "fp16"}, events=skipped, ranks=1)
    found = first(run)
    assert found.id == "nan"
    assert found.evidence["last_good_step"] == 6
    assert found.evidence["loss_scales"] == [32768.0, 16384.0]
    assert found.change.startswith("--set plan.precision=bf16")
    assert "--set optimizer.lr=0.01 (it was 0.1)" in found.change
    assert "initial" not in found.change


def test_a_nan_without_fp16_does_not_ask_for_another_precision(tmp_path: Path) -> None:
    found = first(written_run(tmp_path, error={"kind": "do-not-restart", "message": "the loss is nan at step 7"}))
    assert found.id == "nan"
    assert "precision" not in found.change


def test_a_nan_before_any_update_is_not_blamed_on_the_learning_rate(tmp_path: Path) -> None:
    error = {
        "kind": "do-not-restart",
        "message": "the loss is inf at step 1; the last good step is 0, and there is no checkpoint yet. Samples of ...",
        "step": 1,
        "sample_indices": [1, 2],
    }
    found = first(written_run(tmp_path, error=error, ranks=1))
    assert (found.id, found.confidence) == ("nan", "high")
    assert "before any update of the weights, so it is not the learning rate" in found.verdict
    assert found.change.startswith("--set anomaly=true")
    assert "a log of 0" in found.change
    assert not any(word in found.change for word in ("optimizer", "precision"))


@pytest.mark.parametrize(("skipped", "untrained"), [((1, 2), True), ((2,), False)])
def test_steps_that_were_all_skipped_are_no_updates(tmp_path: Path, skipped: tuple[int, ...], untrained: bool) -> None:
    error = {"kind": "do-not-restart", "message": "the loss is nan at step 3", "step": 3}
    events = [{"event": "skipped-step", "step": step, "scale_before": 2.0} for step in skipped]
    run = written_run(tmp_path, error=error, plan={"precision": "fp16"}, events=events, ranks=1)
    change = first(run).change
    assert change.startswith("--set plan.precision=bf16")
    assert ("anomaly=true" in change, "optimizer.lr" in change) == (untrained, not untrained)


def test_a_nan_at_step_1_of_a_script_that_may_count_from_0_keeps_the_usual_advice(tmp_path: Path) -> None:
    found = first(written_run(tmp_path, error={"kind": "exception", "message": "loss is nan at step 1"}, script=SCRIPT))
    assert "a tenth of the learning rate" in found.change


# -- who did not come --------------------------------------------------------------------------------------------------

NCCL = (
    "[rank{rank}]:[E1116 10:00:00.123 ProcessGroupNCCL.cpp:688] {who} Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={number}, OpType={kind}, NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600025 "
    "milliseconds before timing out.\n"
    "[rank{rank}]:[E1116 10:00:00.124 ProcessGroupNCCL.cpp:2350] {who} failure detected by watchdog at work sequence "
    "id: {number} PG status: last enqueued work: {enqueued}, last completed work: {done}\n"
)


def nccl(rank: int, number: int, enqueued: int, kind: str = "ALLREDUCE", who: str | None = None) -> str:
    who = who or f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    return NCCL.format(rank=rank, number=number, kind=kind, enqueued=enqueued, done=number - 1, who=who)


def test_of_ranks_with_nccl_timeouts_the_one_with_the_fewest_collectives_is_behind(tmp_path: Path) -> None:
    logs = {"n1": nccl(0, 41, 44) + nccl(1, 41, 44), "n2": nccl(2, 41, 40) + nccl(3, 41, 44)}
    died = {
        "kind": "rank-died",
        "message": "rank 0 on n1 was killed by SIGABRT",
        "rank": 0,
        "node": "n1",
        "signal": "SIGABRT",
    }
    found = first(written_run(tmp_path, error=died, logs=logs, script=SCRIPT, ranks=4))
    assert found.id == "collective-timeout"
    assert found.evidence["absent_ranks"] == [2]
    assert found.evidence["node"] == "n2"
    assert found.evidence["waited_seconds"] == 600.0


def test_the_rank_that_does_not_complain_of_nccl_is_the_one_that_others_wait_for(tmp_path: Path) -> None:
    logs = {"n1": nccl(0, 5, 5, who="[Rank 0]"), "n2": of_rank(1, "saving a very large file")}
    died = {"kind": "rank-died", "message": "rank 0 on n1 was killed by SIGABRT", "rank": 0, "signal": "SIGABRT"}
    found = first(written_run(tmp_path, error=died, logs=logs, script=SCRIPT))
    assert found.evidence["absent_ranks"] == [1]
    assert found.evidence["its_last_line"] == "saving a very large file"
    assert "rank 1 on n2" in found.verdict


def test_ranks_in_different_collectives_are_told_apart(tmp_path: Path) -> None:
    text = "".join(nccl(rank, 9, 9) for rank in (0, 1, 2)) + nccl(3, 9, 9, kind="ALLGATHER")
    died = {"kind": "rank-died", "message": "rank 0 was killed by SIGABRT", "rank": 0, "signal": "SIGABRT"}
    found = first(written_run(tmp_path, error=died, logs={"n1": text}, script=SCRIPT, ranks=4))
    assert found.evidence["absent_ranks"] == [3]
    assert "ALLGATHER" in found.verdict


GLOO = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for recv "
    "operation to complete"
)


def test_a_gloo_timeout_names_the_rank_that_was_not_there(tmp_path: Path) -> None:
    logs = {"n1": of_rank(0, TRACEBACK.format(code="dist.all_reduce(x)", error=GLOO)) + of_rank(1, "writes results")}
    found = first(written_run(tmp_path, error=raised(GLOO, "dist.all_reduce(x)"), logs=logs, script=SCRIPT))
    assert found.id == "collective-timeout"
    assert found.evidence["absent_ranks"] == [1]
    assert found.evidence["waited_seconds"] == 4.0
    assert found.confidence == "high"


def test_a_monitored_barrier_names_who_did_not_pass(tmp_path: Path) -> None:
    said = "RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 30000 ms"
    logs = {"n1": of_rank(0, said)}
    found = first(written_run(tmp_path, error=raised(said), logs=logs, script=SCRIPT, ranks=4))
    assert found.evidence["absent_ranks"] == [1, 3]


def test_ranks_that_never_met_are_counted(tmp_path: Path) -> None:
    said = "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 1/2 clients joined."
    found = first(written_run(tmp_path, error=raised(said), logs={"n1": of_rank(0, said)}, script=SCRIPT))
    assert found.id == "collective-timeout"
    assert (found.evidence["ranks_that_came"], found.evidence["ranks_expected"]) == (1, 2)


def test_a_hang_that_the_watchdog_saw_names_rank_node_and_stacks(tmp_path: Path) -> None:
    error = {
        "kind": "hang",
        "message": "the run hangs at step 20: no rank has come on for 4 s. rank 1 on n2 is behind: in the forward pass",
        "rank": 1,
        "node": "n2",
        "step": 19,
        "seconds": 4.2,
        "stacks": "attempts/1/stacks/rank-1.txt",
    }
    found = first(written_run(tmp_path, error=error))
    assert found.id == "collective-timeout"
    assert (found.evidence["rank"], found.evidence["node"]) == (1, "n2")
    assert "attempts/1/stacks/rank-1.txt" in found.change


def test_a_rank_that_failed_by_itself_is_the_cause_though_others_timed_out_waiting(tmp_path: Path) -> None:
    logs = {"n1": of_rank(0, GLOO)}
    error = raised("ValueError: the cat is on the keyboard", code="lessons(step)", rank=1)
    found = first(written_run(tmp_path, error=error, logs=logs, script=SCRIPT))
    assert found.id == "crash"
    assert (found.evidence["file"], found.evidence["line"], found.evidence["rank"]) == ("/home/ada/train.py", 17, 1)
    assert "the cat is on the keyboard" in found.verdict


# -- killed and lost ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "how"),
    [
        ("slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-11-16T10:00:00 DUE TO TIME LIMIT ***", "TIMEOUT"),
        ("slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-11-16T10:00:00 DUE TO PREEMPTION ***", "PREEMPTED"),
        ("slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-11-16T10:00:00 DUE TO NODE FAILURE ***", "NODE_FAIL"),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=17.0. Some of the step tasks have been OOM Killed.",
            "OUT_OF_MEMORY",
        ),
    ],
)
def test_what_slurm_writes_into_the_log_says_why_a_job_was_killed(tmp_path: Path, said: str, how: str) -> None:
    error = {"kind": "rank-died", "message": "rank 0 on n1 was killed by SIGKILL", "rank": 0, "signal": "SIGKILL"}
    run = written_run(tmp_path, error=error, logs={"n1": said + "\n"})
    found = first(run)
    assert found.id == "job-killed"
    assert found.evidence["slurm_state"] == how
    assert how in found.verdict


def test_a_rank_killed_by_a_signal_that_nobody_explains_is_told_so(tmp_path: Path) -> None:
    error = {"kind": "rank-died", "message": "rank 1 on n1 was killed by SIGKILL", "rank": 1, "node": "n1"}
    found = first(written_run(tmp_path, error=error, logs={"n1": ""}))
    assert (found.id, found.confidence) == ("job-killed", "medium")
    assert "gradus train --resume dead/x" in found.change


def test_a_run_whose_launcher_is_gone_is_lost(tmp_path: Path) -> None:
    run = written_run(tmp_path, state="running", step=12)
    text = run.status_path.read_text()
    run.status_path.write_text(text.replace('"updated_at": "20', '"updated_at": "19'))
    found = first(run)
    assert found.id == "lost"
    assert found.evidence["step"] == 12
    assert "gradus train --resume dead/x goes on from the beginning" in found.change


@pytest.mark.parametrize("state", ["finished", "stopped", "running"])
def test_a_run_that_is_not_dead_has_no_cause_of_death(tmp_path: Path, state: str) -> None:
    assert findings(written_run(tmp_path, state=state, logs={"n1": GPU_IS_FULL})) == ()


def test_an_error_of_which_nothing_is_known_is_told_as_it_is(tmp_path: Path) -> None:
    found = first(written_run(tmp_path, error={"kind": "launch-failed", "message": "the ranks left with exit code 3"}))
    assert found.id == "crash"
    assert "gradus runs logs dead/x" in found.change


def test_a_crash_says_that_without_a_checkpoint_it_starts_over(tmp_path: Path) -> None:
    run = written_run(tmp_path, error=raised("KeyError: 'x'"), step=12)
    starts_over = "gradus train --resume dead/x, which starts over: there is no checkpoint yet"
    assert first(run).change.endswith(f"line 17; then {starts_over}")
    (run.checkpoints / step_name(10)).mkdir()
    (run.checkpoints / step_name(10) / COMMITTED).write_text("{}")
    assert first(run).change.endswith("line 17; then gradus train --resume dead/x")


def test_whether_a_script_starts_over_is_up_to_the_script(tmp_path: Path) -> None:
    found = first(written_run(tmp_path, error=raised("KeyError: 'x'"), script=SCRIPT))
    assert found.change.endswith("which goes on from what the script itself saved, or starts over")


# -- what a reader would be led astray by ------------------------------------------------------------------------------


def test_a_torch_without_nccl_is_told_as_that(tmp_path: Path) -> None:
    error = raised("RuntimeError: Distributed package doesn't have NCCL built in", 'init_process_group("nccl")')
    found = first(written_run(tmp_path, error=error, script=SCRIPT))
    assert found.id == "no-process-group"
    assert "no NCCL" in found.verdict
    assert "gloo" in found.change
    assert "before line" not in found.change


@pytest.mark.parametrize(
    ("output", "said", "line"),
    [
        (
            '  File "/home/ada/train.py", line 7\n    for x in\n            ^\nSyntaxError: invalid syntax',
            "SyntaxError",
            7,
        ),
        ("no data in /scratch/ada", "no data in /scratch/ada", None),
    ],
)
def test_last_words_without_a_traceback_are_told(tmp_path: Path, output: str, said: str, line: int | None) -> None:
    error = {"kind": "rank-died", "message": "rank 0 on n1 left with exit code 1", "rank": 0, "node": "n1"}
    found = first(written_run(tmp_path, error={**error, "output": output}, script=SCRIPT))
    assert found.id == "crash"
    assert said in found.verdict
    assert found.evidence.get("line") == line


@pytest.mark.parametrize("folder", ["/home/ada/gradus/faults", "/home/ada/torch/runs"])
def test_code_in_a_folder_of_the_same_name_is_the_users_all_the_same(tmp_path: Path, folder: str) -> None:
    error = raised("KeyError: 'x'")
    error["traceback"] = str(error["traceback"]).replace("/home/ada", folder)
    found = first(written_run(tmp_path, error=error, script=SCRIPT))
    assert found.evidence["file"] == f"{folder}/train.py"
    assert found.evidence["line"] == 17


def test_a_name_that_is_missing_in_a_file_of_ones_own_is_mended_there(tmp_path: Path) -> None:
    error = raised("ImportError: cannot import name 'Net' from 'helpers' (/home/ada/helpers.py)", "import helpers")
    found = first(written_run(tmp_path, error=error, script=SCRIPT))
    assert found.id == "import-error"
    assert found.change.startswith("mend /home/ada/helpers.py, which has no 'Net'")


def test_a_run_that_a_person_ended_at_once_has_no_finding(tmp_path: Path) -> None:
    error = {"kind": "interrupted", "message": "ended at once by a second interrupt", "rank": None}
    assert findings(written_run(tmp_path, error=error, ranks=1)) == ()


def test_ranks_that_never_met_are_told_though_they_finished(tmp_path: Path) -> None:
    event = {"event": "finding", "message": "no rank ever connected to another: all 2 ranks did the same work"}
    found = first(written_run(tmp_path, state="finished", script=SCRIPT, events=[event]))
    assert found.id == "no-process-group"
    assert "init_process_group" in found.change


def test_a_loss_that_was_0_before_it_was_no_number_is_no_crash_of_ours(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 0.0} for step in range(1, 5)]
    error = {"kind": "nan", "message": "the loss is nan at step 5", "rank": 0, "step": 5}
    assert first(written_run(tmp_path, error=error, rows=rows, ranks=1)).id == "nan"
