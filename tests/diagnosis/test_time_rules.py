"""Rules about time, on runs that were made up: each with what must be named, and what must not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from made_up_runs import ON_CPU, ON_GPU, STEP, run_with

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.explain import explain
from gradus.diagnosis.finding import Finding
from gradus.launcher.script import Script
from gradus.record.directory import RunDirectory
from gradus.schema.cluster import Cluster
from gradus.schema.profile_request import ProfileRequest

TWO = {"mesh": {"replicate": 2}, "micro_batch": 16}


def found_in(run: RunDirectory) -> dict[str, Finding]:
    return {one.id: one for one in explain(Evidence.of_run(run)).findings}


def only(run: RunDirectory) -> Finding:
    [one] = explain(Evidence.of_run(run)).findings
    return one


# -- data


def test_samples_loaded_by_the_training_process_itself(tmp_path):
    one = only(run_with(tmp_path, seconds={**STEP, "data": 0.3}, plan={"workers": 0}))
    assert one.id == "data-bound"
    assert one.change == "--set plan.workers=4"  # 0.3 s of loading beside 0.1 s of the rest
    assert one.gain_at_most == pytest.approx(0.75)


def test_too_few_workers_while_cores_are_free(tmp_path):
    run = run_with(tmp_path, seconds={**STEP, "data": 0.1}, plan={"workers": 1}, host={"ranks_cpu_seconds": [0.0, 4.0]})
    one = only(run)
    assert (one.id, one.change) == ("too-few-workers", "--set plan.workers=3")


def test_workers_that_keep_all_cores_busy_need_cheaper_samples(tmp_path):
    run = run_with(
        tmp_path, seconds={**STEP, "data": 0.1}, plan={"workers": 3}, host={"ranks_cpu_seconds": [0.0, 31.9]}
    )
    one = only(run)
    assert one.id == "data-bound"
    assert "data pack" in one.change


def test_a_disk_that_is_read_all_the_time_is_what_is_slow(tmp_path):
    host = {"ranks_cpu_seconds": [0.0, 2.0], "read_bytes": [0, 400 * 2**20]}
    one = only(run_with(tmp_path, seconds={**STEP, "data": 0.1}, plan={"workers": 3}, host=host))
    assert one.id == "slow-storage"
    assert "data.stage=auto" in one.change


def test_a_little_waiting_for_samples_is_nothing(tmp_path):
    assert not found_in(run_with(tmp_path, seconds={**STEP, "data": 0.015}, plan={"workers": 0}))
    tiny = {"forward": 0.001, "backward": 0.002, "data": 0.002}  # a toy: large in share, and nothing to gain
    assert not found_in(run_with(tmp_path, seconds=tiny, plan={"workers": 0}, run_id="y"))


# -- beside the steps


def test_a_loop_that_does_much_between_steps(tmp_path):
    own = {"model": {"use": "own"}, "data": {"use": "own"}, "optimizer": {"use": "own"}}
    one = only(run_with(tmp_path, recipe=own, seconds={**STEP, "other": 0.1}))
    assert (one.id, one.gain_at_most) == ("work-beside-steps", pytest.approx(0.5))
    assert "loop's own code" in one.verdict
    assert one.evidence["other_seconds"] == pytest.approx(0.1)
    assert "what follows run.step" in one.change
    assert "--profile steps=5,stacks" in one.change


def test_hooks_that_do_much_between_steps_are_named(tmp_path):
    one = only(run_with(tmp_path, recipe={"hooks": ["diary.py:Diary"]}, seconds={**STEP, "other": 0.1}))
    assert one.id == "work-beside-steps"
    assert "diary.py:Diary" in one.verdict


def test_a_little_between_steps_is_nothing(tmp_path):
    hooks = {"hooks": ["diary.py:Diary"]}
    assert not found_in(run_with(tmp_path, recipe=hooks, seconds={**STEP, "other": 0.015}))
    tiny = {"forward": 0.001, "backward": 0.002, "other": 0.003}
    assert not found_in(run_with(tmp_path, recipe=hooks, seconds=tiny, run_id="y"))
    on_one = {0: {**STEP, "other": 0.1}, 1: {**STEP, "exposed_communication": 0.1}}
    found = found_in(run_with(tmp_path, recipe=hooks, seconds=on_one, plan=TWO, run_id="z"))
    assert "work-beside-steps" not in found, "a straggler"


# -- other ranks


def test_a_rank_that_computes_longer_than_the_others(tmp_path):
    fast = {**STEP, "exposed_communication": 0.1}
    slow = {"forward": 0.08, "backward": 0.11, "optimizer": 0.01}
    one = only(run_with(tmp_path, seconds={0: fast, 1: slow}, plan=TWO))
    assert one.id == "straggler"
    assert (one.evidence["rank"], one.evidence["why"]) == (1, "computing")
    assert one.gain_at_most == pytest.approx(0.5)


def test_a_straggler_in_an_own_loop_is_told_with_the_command_that_finds_the_line(tmp_path):
    slow = {"forward": 0.08, "backward": 0.11, "optimizer": 0.01}
    seconds = {0: {**STEP, "exposed_communication": 0.1}, 1: slow}
    own = {"model": {"use": "own"}, "data": {"use": "own"}}
    run = run_with(tmp_path, seconds=seconds, plan=TWO, recipe=own)
    (run.attempt_path(1) / "command.json").write_text(Script("file", "loop.py", (), tmp_path, 2).to_json())
    [command] = re.findall("`(.*)`", found_in(run)["straggler"].change)
    assert command == "gradus train --nproc 2 --profile steps=5,ranks=all,stacks -- loop.py"
    asked = ProfileRequest.parse(command.split()[5])
    assert (asked.steps, asked.ranks, asked.stacks) == (5, (), True)


@pytest.mark.parametrize(("steps", "named"), [(3, False), (7, False), (8, True)])
def test_a_rank_that_was_slow_in_very_few_steps_is_no_straggler(tmp_path, steps, named):
    slow = {"forward": 0.08, "backward": 0.11, "optimizer": 0.01}
    seconds = {0: {**STEP, "exposed_communication": 0.1}, 1: slow}
    assert ("straggler" in found_in(run_with(tmp_path, steps=steps, seconds=seconds, plan=TWO))) == named


def test_a_rank_that_loads_longer_than_the_others(tmp_path):
    fast = {**STEP, "exposed_communication": 0.1}
    found = found_in(run_with(tmp_path, seconds={0: fast, 1: {**STEP, "data": 0.1}}, plan={**TWO, "workers": 0}))
    assert found["straggler"].evidence["why"] == "loading its data"
    assert set(found) == {"straggler"}  # the others wait for that rank, and not for samples or transfers


def test_ranks_that_differ_a_little_are_no_stragglers(tmp_path):
    a, b = {**STEP, "exposed_communication": 0.02}, {**STEP, "forward": 0.05}
    assert not found_in(run_with(tmp_path, seconds={0: a, 1: b}, plan=TWO))


def test_communication_that_nothing_hides(tmp_path):
    one = only(run_with(tmp_path, seconds={**STEP, "exposed_communication": 0.1}, plan=TWO))
    assert one.id == "exposed-communication"
    assert one.gain_at_most == pytest.approx(0.5)
    assert "compression=bf16" in one.change


def test_ranks_that_are_late_in_turns_wait_for_each_other_and_not_for_transfers(tmp_path):
    run = run_with(tmp_path, seconds={**STEP, "exposed_communication": 0.1}, plan=TWO)
    for rank in (0, 1):
        path = run.path / "timings" / f"rank-{rank}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            late = line["step"] % 2 == rank
            line["seconds"] |= {"exposed_communication": 0.0, "other": 0.1} if late else {}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not found_in(run)


def test_sharding_across_nodes_is_to_be_hybrid(tmp_path):
    nodes = Cluster(name="two", nodes=2, gpus_per_node=4, gpu="h200-sxm", cpu_cores=16, memory_gib=128.0)
    plan = {"mesh": {"shard": 8}, "zero": 3, "micro_batch": 4, "precision": "bf16"}
    run = run_with(tmp_path, seconds={**STEP, "exposed_communication": 0.04}, plan=plan, cluster=nodes, gpu={})
    assert "plan.mesh={replicate: 2, shard: 4}" in found_in(run)["exposed-communication"].change


def test_a_few_percent_of_communication_are_nothing(tmp_path):
    plan = {**TWO, "precision": "bf16"}
    run = run_with(tmp_path, seconds={**STEP, "exposed_communication": 0.008}, plan=plan, cluster=ON_GPU, gpu={})
    assert not found_in(run)


def test_more_gpus_than_help_beside_a_run_with_fewer(tmp_path):
    of = [{"step": n, "loss": 2.0, "samples_per_second": 100.0} for n in range(1, 41)]
    run_with(tmp_path, cluster=ON_GPU, gpu={}, rows=of, plan={"precision": "bf16"}, run_id="one")
    nodes = ON_GPU.model_copy(update={"gpus_per_node": 4})
    of = [{"step": n, "loss": 2.0, "samples_per_second": 150.0} for n in range(1, 41)]
    plan = {"mesh": {"replicate": 4}, "micro_batch": 8, "precision": "bf16"}
    found = found_in(run_with(tmp_path, cluster=nodes, gpu={}, rows=of, plan=plan, run_id="four"))
    one = found["too-many-gpus"]
    assert one.evidence["efficiency_share"] == pytest.approx(0.375)
    assert one.evidence["amdahl_parallel_fraction"] == pytest.approx(0.4444, abs=1e-4)
    assert "--nproc 1" in one.change


def test_nccl_that_talks_through_sockets(tmp_path):
    log = "n1:1:1 [0] NCCL INFO NET/IB : No device found.\n"
    log += "n1:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0\n"
    found = found_in(run_with(tmp_path, cluster=ON_GPU, gpu={}, log=log, plan={**TWO, "precision": "bf16"}))
    assert found["nccl-sockets"].evidence["reasons"] == "NET/IB : No device found."


# -- pipeline

STAGES = {"mesh": {"pipeline": 2}, "micro_batch": 4, "accumulate": 8}


def test_a_stage_that_has_more_to_do(tmp_path):
    first, second = {**STEP, "exposed_communication": 0.15}, {"forward": 0.08, "backward": 0.16, "optimizer": 0.01}
    plan = {**STAGES, "stage_blocks": [1, 5]}
    one = only(run_with(tmp_path, seconds={0: first, 1: second}, plan=plan))
    assert one.id == "unbalanced-pipeline"
    assert "[3, 3]" in one.change
    assert one.gain_at_most == pytest.approx(0.075 / 0.25)


def test_few_micro_batches_leave_a_bubble(tmp_path):
    plan = {**STAGES, "micro_batch": 16, "accumulate": 2}
    one = only(run_with(tmp_path, seconds={**STEP, "exposed_communication": 0.05}, plan=plan))
    assert one.id == "pipeline-bubble"
    assert one.change == "--set plan.accumulate=8 --set plan.micro_batch=4"
    assert one.gain_at_most == pytest.approx(1 / 3)


def test_a_balanced_pipeline_with_many_micro_batches_is_sound(tmp_path):
    assert not found_in(run_with(tmp_path, seconds={**STEP, "exposed_communication": 0.012}, plan=STAGES))


# -- stalls


def saved(times: int) -> list[dict[str, Any]]:
    return [{"event": "checkpoint", "step": n, "bytes": 10**8} for n in range(1, times + 1)]


def test_checkpoints_that_stop_training(tmp_path):
    one = only(run_with(tmp_path, seconds={**STEP, "checkpoint": 0.05}, events=saved(20)))
    assert one.id == "checkpoint-stall"
    assert "checkpoint.every=" in one.change
    assert one.gain_at_most == pytest.approx(1 / 3, abs=0.01)  # but for what the end of the run took


def test_one_checkpoint_at_the_end_of_a_short_run_is_nothing(tmp_path):
    assert not found_in(run_with(tmp_path, seconds={**STEP, "checkpoint": 0.05}, events=saved(1)))


def evaluated(times: int) -> list[dict[str, Any]]:
    return [{"step": n, "loss": 2.0, "validation_loss": 2.0, "evaluation_seconds": 0.1} for n in range(1, times + 1)]


def test_evaluations_that_take_most_of_the_time(tmp_path):
    one = only(run_with(tmp_path, seconds={**STEP, "evaluation": 0.1}, rows=evaluated(40)))
    assert (one.id, one.gain_at_most) == ("evaluation-share", pytest.approx(0.5, abs=0.01))
    assert "evaluate.every=20" in one.change  # 0.1 s of evaluation for every 2 s of training


def test_one_evaluation_is_nothing(tmp_path):
    assert not found_in(run_with(tmp_path, seconds={**STEP, "evaluation": 0.1}, rows=evaluated(1)))


# -- cores


def test_more_threads_than_cores(tmp_path):
    start = {"event": "start", "step": 0, "device": "cpu", "threads": 8, "parameters": 10**6}
    seconds = {**STEP, "exposed_communication": 0.1}
    one = only(run_with(tmp_path, seconds=seconds, events=[start], plan=TWO, cluster=ON_CPU))
    assert one.id == "cpu-oversubscription"
    assert one.change.startswith("OMP_NUM_THREADS=2 ")


def test_more_workers_than_cores_while_they_are_busy(tmp_path):
    busy = {"ranks_cpu_seconds": [0.0, 15.9]}
    one = only(run_with(tmp_path, plan={"workers": 12}, host=busy))
    assert one.id == "cpu-oversubscription"
    assert not found_in(run_with(tmp_path, plan={"workers": 12}, host={"ranks_cpu_seconds": [0.0, 5.0]}, run_id="y"))


# -- advice that can be taken


def test_advice_for_an_own_loop_is_a_key_of_its_recipe_and_no_flag(tmp_path):
    own = {"model": {"use": "own"}, "data": {"use": "own"}}
    run = run_with(tmp_path, recipe=own, seconds={**STEP, "data": 0.5}, plan={"workers": 0})
    change = found_in(run)["data-bound"].change
    assert "plan: {workers: " in change
    assert "in the recipe of gradus.Run.start" in change
    assert "--set" not in change


def test_workers_that_compute_are_no_more_than_cores(tmp_path):
    heavy = {"data": 0.1, "forward": 0.002, "backward": 0.003}
    run = run_with(tmp_path, seconds=heavy, plan={"workers": 0}, host={"ranks_cpu_seconds": [0.0, 4.0], "cores": 2})
    assert found_in(run)["data-bound"].change == "--set plan.workers=1"
    waits = run_with(tmp_path, seconds=heavy, plan={"workers": 0}, host={"ranks_cpu_seconds": [0.0, 0.4]}, run_id="y")
    assert "--set plan.workers=16" in found_in(waits)["data-bound"].change


def test_a_straggler_on_the_only_node_is_not_to_be_left_without_it(tmp_path):
    slow = {0: {**STEP, "data": 0.3}, 1: {**STEP, "exposed_communication": 0.3}}
    found = found_in(run_with(tmp_path, seconds=slow, plan=TWO))
    assert "--exclude" not in found["straggler"].change


def test_a_smaller_run_beside_it_hides_no_straggler(tmp_path):
    of = [{"step": n, "loss": 2.0, "samples_per_second": 400.0} for n in range(1, 41)]
    run_with(tmp_path, rows=of, run_id="one")
    slow = {0: {"forward": 0.3}, 1: {"forward": 0.05, "exposed_communication": 0.25}}
    of = [{"step": n, "loss": 2.0, "samples_per_second": 50.0} for n in range(1, 41)]
    found = found_in(run_with(tmp_path, seconds=slow, plan=TWO, rows=of, run_id="two"))
    assert next(iter(found)) == "straggler"
