"""After each attempt: whether and where a run goes on. Every rule as a claim, and what must hold for any history."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.launcher.verdict import DRILL_IS_OVER, Ended, verdict

NODES = ("n1", "n2", "n3", "n4")


def failed(attempt: int = 1, **facts: Any) -> Ended:
    base = Ended(attempt, "failed", 1, error_kind="exception", error_message="ValueError: no", nodes=NODES, node="n1")
    facts.setdefault("error_signature", f"{facts.get('error_kind')} {facts.get('error_message')}")
    return replace(base, **facts)


def stopped(attempt: int = 1, reason: str = "SIGUSR1", **facts: Any) -> Ended:
    return replace(Ended(attempt, "stopped", 75, stop_reason=reason, nodes=NODES), **facts)


def lost(attempt: int = 1, **facts: Any) -> Ended:
    return replace(Ended(attempt, "lost", None, nodes=NODES, error_signature="lost: nobody wrote"), **facts)


# -- one attempt ------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_finished():
    found = verdict([Ended(1, "finished", 0, step_reached=200)], 3)
    assert (found.decision, found.exit_code) == ("finished", 0)
    assert "step 200" in found.reason


def test_a_script_that_does_not_count_steps_is_finished_at_none():
    assert "step" not in verdict([Ended(1, "finished", 0, counts_steps=False)], 3).reason


@pytest.mark.parametrize("reason", ["gradus runs cancel", DRILL_IS_OVER])
def test_what_is_stopped_for_good_is_not_requeued_and_waits_for_nobody(reason):
    found = verdict([stopped(reason=reason, step_saved=4)], 3)
    assert found.decision == "hold"
    assert "taken out of the queue" in found.reason
    assert "released" not in found.reason


@pytest.mark.parametrize("reason", ["SIGUSR1", "SIGTERM", "the job ends at 12:00:00 UTC, in 60 s", "preempted"])
def test_a_stop_request_of_the_scheduler_is_a_requeue(reason):
    found = verdict([stopped(reason=reason, step_reached=30, step_saved=30)], 3)
    assert (found.decision, found.exit_code) == ("requeue", 75)
    assert reason in found.reason
    assert "step 30" in found.reason


@pytest.mark.parametrize("reason", ["gradus runs stop", "stop file", "SIGINT"])
def test_a_stop_request_of_a_person_holds_the_run(reason):
    found = verdict([stopped(reason=reason, step_reached=30, step_saved=30)], 3)
    assert (found.decision, found.exit_code) == ("hold", 75)


@pytest.mark.parametrize("last", [failed(), lost(), stopped()], ids=["failed", "lost", "stopped"])
def test_a_cancelled_job_is_over_without_a_requeue(last):
    assert verdict([last], 3, cancelled=True).exit_code == 1


def test_a_run_that_finished_before_it_was_cancelled_is_finished():
    assert verdict([Ended(1, "finished", 0)], 3, cancelled=True).decision == "finished"


@pytest.mark.parametrize(
    "facts",
    [{"exit_code": 93}, {"exit_code": 2}, {"exit_code": 3}]
    + [{"error_kind": kind} for kind in ("do-not-restart", "bad-input", "no-plan")],
)
def test_what_says_itself_that_it_would_fail_again_is_given_up_at_once(facts):
    found = verdict([failed(step_reached=7, step_saved=5, **facts)], 3)
    assert (found.decision, found.exit_code) == ("give-up", 93)
    assert "ValueError: no" in found.reason


def test_a_failure_with_retries_left_is_tried_again_in_the_same_allocation():
    found = verdict([failed(step_reached=7, step_saved=5)], 3)
    assert (found.decision, found.exit_code) == ("again", 10)
    assert "step 0 to 7" in found.reason
    assert "saved step 5" in found.reason
    assert "3 of 3 retries" in found.reason


def test_where_the_scheduler_takes_the_nodes_away_it_goes_back_to_the_queue_and_not_on_them():
    found = verdict([failed(step_reached=7, step_saved=5)], 3, nodes_stay=False)
    assert (found.decision, found.exit_code) == ("requeue", 75)
    assert "takes its nodes away" in found.reason


def test_without_retries_a_failure_is_a_failure():
    assert verdict([failed(step_reached=7, step_saved=5)], 0).exit_code == 1


def test_what_a_person_ended_at_once_is_not_restarted():
    assert verdict([failed(error_kind="interrupted")], 3).exit_code == 1


def test_a_lost_attempt_goes_back_to_the_queue():
    assert verdict([lost(step_reached=7, step_saved=5)], 3).decision == "requeue"


# -- the same again ---------------------------------------------------------------------------------------------------


def test_a_deterministic_crash_at_step_7_ends_with_93_after_the_second_time():
    first = failed(1, step_begun=0, step_reached=7, step_saved=5)
    second = failed(2, step_begun=5, step_reached=7, step_saved=5)
    assert verdict([first], 3).decision == "again"
    found = verdict([first, second], 3)
    assert (found.decision, found.exit_code) == ("give-up", 93)
    assert "step 7" in found.reason
    assert "attempts 1 and 2" in found.reason


@pytest.mark.parametrize("nodes", [("n1",), NODES], ids=["one node", "four nodes"])
def test_a_crash_at_the_start_that_comes_again_on_another_node_is_given_up(nodes):
    there = nodes[-1]
    assert verdict([failed(1, nodes=nodes), failed(2, nodes=nodes, node=there)], 3).decision == "give-up"


def test_another_error_at_the_same_step_is_not_the_same_error():
    history = [failed(1, step_reached=7), failed(2, step_reached=7, error_message="KeyError: 3", node="n2")]
    assert verdict(history, 3).decision == "again"


def test_the_same_error_further_on_is_not_the_same_place():
    history = [failed(1, step_reached=7, step_saved=5), failed(2, step_begun=5, step_reached=9, step_saved=8)]
    assert verdict([*history[:1], replace(history[1], node="n2")], 3).decision == "again"


def test_an_error_that_comes_between_does_not_hide_that_the_first_one_came_again():
    crash = {"step_begun": 5, "step_saved": 5, "step_reached": 7}
    between = failed(2, **crash, error_message="OSError: flaky", node="n3")
    assert verdict([failed(1, **{**crash, "step_begun": 0}), between, failed(3, **crash)], 3).decision == "give-up"


def test_the_same_error_at_the_same_step_weeks_and_checkpoints_ago_is_forgotten():
    """Steps are counted up: it can only come again at that step when checkpoints were lost."""
    history = [
        failed(1, step_reached=7, step_saved=5),
        stopped(2, step_begun=5, step_reached=50, step_saved=50),
        failed(3, step_begun=5, step_reached=7, step_saved=50, node="n2"),
    ]
    assert verdict(history, 3).decision == "again"


def test_a_gpu_out_of_memory_gets_one_more_try_and_no_third():
    first = failed(1, step_reached=3, error_kind="out-of-memory", error_message="rank 0 needed 90 GiB")
    second = failed(2, step_reached=9, error_message="torch.OutOfMemoryError: CUDA out of memory. 1 GiB", node="n2")
    assert verdict([first], 3).decision == "again"
    assert verdict([first, second], 3).exit_code == 93


def test_a_run_that_saves_between_two_failures_for_want_of_memory_is_not_given_up():
    first = failed(1, step_reached=300, step_saved=300, error_kind="out-of-memory")
    second = failed(2, step_begun=300, step_reached=900, step_saved=900, error_kind="out-of-memory", node="n2")
    assert verdict([first, second], 3).decision == "again"


def test_a_script_that_fails_twice_with_the_same_words_is_given_up():
    first, second = (failed(n, counts_steps=False, nodes=("n1",)) for n in (1, 2))
    assert verdict([first], 3).decision == "again"
    assert verdict([first, second], 3).decision == "give-up"


def test_a_script_that_runs_into_its_time_limit_is_requeued_for_ever():
    history = [stopped(n, counts_steps=False) for n in range(1, 30)]
    assert {verdict(history[:n], 3).decision for n in range(1, 30)} == {"requeue"}


# -- no progress ------------------------------------------------------------------------------------------------------


def test_no_progress_twice_is_given_up_whatever_the_errors_say():
    history = [failed(1, error_message="A"), failed(2, error_message="B", node="n2")]
    found = verdict(history, 3)
    assert (found.decision, found.exit_code) == ("give-up", 93)
    assert "no progress twice" in found.reason


def test_to_get_further_without_saving_is_progress_but_uses_up_retries():
    history = [failed(n, step_reached=n, error_message=f"E{n}", node=f"m{n}", nodes=()) for n in range(1, 6)]
    decisions = [verdict(history[:n], 3).decision for n in range(1, 5)]
    assert decisions == ["again", "again", "again", "failed"]
    assert verdict(history[:4], 3).exit_code == 1  # nothing says that it would fail again: it was only not allowed to


def test_a_new_checkpoint_gives_all_retries_back():
    without = [failed(n, step_reached=n, error_message=f"E{n}", nodes=()) for n in range(1, 4)]
    saved = failed(4, step_reached=10, step_saved=10, error_message="E4", nodes=())
    assert "0 of 3 retries" in verdict(without, 3).reason
    assert "3 of 3 retries" in verdict([*without, saved], 3).reason


def test_lost_twice_without_progress_is_given_up():
    assert verdict([lost(1), lost(2)], 3).decision == "give-up"


def test_stop_requests_that_never_leave_time_for_a_step_do_not_go_on_for_ever():
    history = [stopped(n) for n in range(1, 6)]
    assert [verdict(history[:n], 3).exit_code for n in range(1, 5)] == [75, 75, 75, 93]
    assert "time limit is too short" in verdict(history[:4], 3).reason


def test_a_preemption_before_the_first_step_is_not_a_failure_to_progress():
    history = [failed(1, step_reached=7, step_saved=5), stopped(2, step_begun=5, step_reached=5, step_saved=5)]
    assert verdict(history, 3).decision == "requeue"


# -- nodes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "facts",
    [
        {"error_message": "CUDA error: uncorrectable ECC error encountered"},
        {"error_message": "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."},
        {
            "error_kind": "lost-peer",
            "error_message": "DistBackendError: NCCL error: unhandled system error (run with…)",
        },
        {"error_kind": "hang", "error_message": "rank 5 is 3 steps behind"},
        {"error_kind": "node-lost", "error_message": "the agent of n3 is gone"},
    ],
    ids=lambda facts: facts["error_message"][:20],
)
def test_one_failure_that_is_a_machines_fault_excludes_the_node(facts):
    found = verdict([failed(1, node="n3", **facts)], 3)
    assert (found.decision, found.exit_code, found.exclude) == ("exclude", 75, ("n3",))
    assert "n3" in found.reason
    assert facts["error_message"] in found.reason


def test_a_node_that_fails_in_two_attempts_is_excluded():
    history = [failed(1, node="n2"), failed(2, node="n2")]  # it never gets to a step
    found = verdict(history, 3)
    assert (found.decision, found.exclude) == ("exclude", ("n2",))
    assert "attempts 1 and 2" in found.reason


def test_a_node_on_which_a_rank_is_killed_twice_at_the_same_step_is_excluded_and_not_the_run():
    killed = {"error_kind": "rank-died", "error_message": "rank 2 on n2 was killed by SIGKILL", "node": "n2"}
    history = [failed(1, step_reached=3, **killed), failed(2, step_reached=3, **killed)]
    assert verdict(history, 3).decision == "exclude"


def test_but_if_it_comes_again_without_that_node_it_was_the_run():
    killed = {"error_kind": "rank-died", "error_message": "rank 2 was killed by SIGKILL", "step_reached": 3}
    history = [failed(1, node="n2", **killed), failed(2, node="n2", **killed), failed(3, node="n4", **killed)]
    assert verdict(history, 3).decision == "give-up"


def test_the_only_node_of_a_run_is_not_suspect_for_being_named_twice():
    history = [failed(n, nodes=("n1",), step_reached=n, error_message=f"E{n}") for n in (1, 2)]
    assert verdict(history, 3).decision == "again"


def test_the_only_node_of_a_run_is_excluded_for_a_machines_fault():
    history = [failed(nodes=("n1",), error_message="uncorrectable ECC error")]
    assert verdict(history, 3).exclude == ("n1",)


def test_a_hang_on_the_only_node_says_nothing_against_it():
    assert verdict([failed(nodes=("n1",), error_kind="hang", step_reached=3)], 3).decision == "again"


def test_who_lost_a_peer_is_not_suspect():
    history = [failed(n, node="n2", error_kind="lost-peer", step_reached=n, step_saved=n) for n in (1, 2)]
    assert verdict(history, 3).decision == "again"


def test_a_node_named_long_ago_is_not_suspect():
    history = [failed(n, node=node, step_reached=n, step_saved=n) for n, node in enumerate(["n2", "n1", "n3", "n2"], 1)]
    assert verdict(history, 3).decision == "again"


def test_a_lost_attempt_whose_node_is_known_to_have_died_goes_on_without_it():
    assert verdict([lost(node="n4")], 3).exclude == ("n4",)


def test_two_broken_machines_at_the_start_are_not_the_runs_failure_to_progress():
    ecc = "uncorrectable ECC error"
    found = verdict([failed(1, node="n1", error_message=ecc), failed(2, node="n2", error_message=ecc)], 3)
    assert (found.decision, found.exclude) == ("exclude", ("n2",))


def test_a_failure_after_that_of_a_broken_machine_is_the_runs_first():
    history = [failed(1, node="n1", error_message="uncorrectable ECC error"), failed(2, node="n2", error_message="E")]
    assert verdict(history, 3).decision == "again"


# -- what holds for any history ---------------------------------------------------------------------------------------

STATES = st.sampled_from(["failed", "failed", "lost", "stopped"])
KINDS = st.sampled_from(["exception", "rank-died", "lost-peer", "hang", "node-lost", "out-of-memory", None])
WORDS = st.sampled_from(["ValueError: no", "uncorrectable ECC error", "unhandled system error", "E1", "E2", None])


@st.composite
def fruitless_attempts(draw: Any) -> Ended:
    """An attempt that saves nothing and gets no further than step 0, in any way a failure can look."""
    state = draw(STATES)
    kind, words = draw(KINDS), draw(WORDS)
    return Ended(
        attempt=1,
        state=state,
        exit_code=draw(st.sampled_from([1, None, -9, 75])),
        stop_reason=draw(st.sampled_from(["SIGUSR1", "SIGTERM"])) if state == "stopped" else None,
        error_kind=kind,
        error_message=words,
        error_signature=draw(st.sampled_from([f"{kind} {words}", "same", None])),
        node=draw(st.sampled_from(["n1", "n2", "n3", None])),
        nodes=draw(st.sampled_from([NODES, ("n1",), ()])),
        counts_steps=(state != "stopped" and draw(st.booleans())) or state == "stopped",
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(fruitless_attempts(), min_size=7, max_size=12), st.integers(0, 4))
def test_no_sequence_of_failures_without_progress_goes_on_for_ever(attempts, retries):
    numbered = [replace(ended, attempt=n) for n, ended in enumerate(attempts, 1)]
    over = [n for n in range(1, len(numbered) + 1) if verdict(numbered[:n], retries).exit_code in (1, 93)]
    assert over
    assert over[0] <= retries + 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(fruitless_attempts(), st.integers(1, 5)), min_size=1, max_size=40), st.integers(1, 4))
def test_no_run_that_gets_further_and_saves_is_ever_given_up(attempts, retries):
    step, history = 0, []
    for number, (ended, gained) in enumerate(attempts, 1):
        reached = step + gained
        ended = replace(ended, attempt=number, step_begun=step, step_reached=reached, step_saved=reached)
        history.append(replace(ended, counts_steps=True))
        step = reached
        assert verdict(history, retries).decision in ("again", "requeue", "exclude")


@settings(max_examples=100, deadline=None)
@given(st.lists(fruitless_attempts(), min_size=1, max_size=8), st.integers(0, 4))
def test_a_verdict_depends_on_the_history_alone_and_has_its_reason(attempts, retries):
    copies = [replace(ended) for ended in attempts]
    found = verdict(attempts, retries)
    assert found == verdict(copies, retries) == verdict(tuple(copies), retries)
    assert len(found.reason) > 20
    assert bool(found.exclude) == (found.decision == "exclude")
