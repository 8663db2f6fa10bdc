"""The ledger: what was decided after each attempt stays decided, whatever happens to its file and its writers."""

from __future__ import annotations

import json
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest

from gradus.launcher.ledger import attempt_ended, excluded, history, ledger_path, read_ledger, settle, unsettled
from gradus.launcher.verdict import Ended
from gradus.record.append_log import AppendLog
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter, rank_writer, read_events
from gradus.record.outcome import write_outcome


def failed(attempt: int, step: int = 0, **facts: Any) -> Ended:
    error = {"error_kind": "exception", "error_message": "no", "error_signature": "exception: no"}
    return Ended(attempt, "failed", **{"exit_code": 1, "step_reached": step, **error, **facts})


def checkpoint(run: RunDirectory, step: int) -> None:
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir()
    (folder / "COMMITTED").touch()


def test_a_settled_attempt_is_a_line_and_an_event_with_the_reason(run):
    found = settle(run, failed(1, 7), 3)
    (line,) = read_ledger(run)
    assert (line.ended, line.verdict) == (failed(1, 7), found)
    (event,) = read_events(run)
    assert (event["event"], event["decision"], event["attempt"]) == ("restart", "again", 1)
    assert event["reason"] == found.reason


def test_the_end_of_a_run_is_told_as_a_verdict(run):
    settle(run, Ended(1, "finished", 0, step_reached=9), 3)
    assert [event["event"] for event in read_events(run)] == ["verdict"]


def test_a_deterministic_crash_is_given_up_across_processes_that_know_only_the_file(run):
    assert settle(run, failed(1, 7, step_saved=5), 3).exit_code == 10
    assert settle(RunDirectory(run.path), failed(2, 7, step_begun=5, step_saved=5), 3).exit_code == 93


def test_an_attempt_is_settled_once(run):
    first = settle(run, failed(1, 7), 3)
    assert settle(run, failed(1, 0, error_message="something else"), 0) == first
    assert len(ledger_path(run).read_text().splitlines()) == 1
    assert len(read_events(run)) == 1


def test_a_torn_line_costs_neither_the_lines_before_nor_those_after(run):
    settle(run, failed(1, 3, step_saved=3), 3)
    with ledger_path(run).open("a") as file:
        file.write('{"attempt": 2, "state": "fai')  # the writer died
    settle(run, failed(3, 6, step_saved=6), 3)
    settle(run, failed(4, 9, step_saved=9), 3)
    assert [line.ended.attempt for line in read_ledger(run)] == [1, 3, 4]


@pytest.mark.parametrize(
    "line",
    ["[]", "nonsense", "{}", '{"attempt": 1, "state": "odd", "decision": "again"}', '{"attempt": "1"}', "\x00\x00"],
)
def test_what_is_no_line_of_a_ledger_is_passed_over(run, line):
    ledger_path(run).write_text(line + "\n")
    assert settle(run, failed(1, 7), 3).decision == "again"
    assert [line.ended.attempt for line in read_ledger(run)] == [1]


def test_a_line_of_a_newer_version_with_further_fields_is_understood(run):
    settle(run, failed(1, 7), 3)
    record = json.loads(ledger_path(run).read_text())
    ledger_path(run).write_text(json.dumps({**record, "temperature": 40}) + "\n")
    assert [line.ended.attempt for line in read_ledger(run)] == [1]


def test_two_that_settle_the_same_attempt_at_once_get_the_same_decision(run):
    found: list[Any] = []
    begin = threading.Barrier(8)

    def one(number: int) -> None:
        begin.wait()
        found.append(settle(run, failed(1, number, error_message=f"as seen by {number}"), 3))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(ledger_path(run).read_text().splitlines()) == 1


def _settle_many(path: Path, attempts: range) -> None:
    for attempt in attempts:
        settle(RunDirectory(path), failed(attempt, attempt, step_saved=attempt), 3)


def test_no_line_is_lost_between_two_processes(run):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_settle_many, args=(run.path, range(start, 40, 2))) for start in (0, 1)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert sorted(line.ended.attempt for line in read_ledger(run)) == list(range(40))


def test_of_two_lines_for_an_attempt_the_first_stands(run):
    """On a file system without locks both are written; all readers must agree."""
    settle(run, failed(1, 7), 3)
    line = json.loads(ledger_path(run).read_text())
    with ledger_path(run).open("a") as file:
        file.write(json.dumps({**line, "decision": "give-up"}) + "\n")
    assert [line.verdict.decision for line in read_ledger(run)] == ["again"]


def test_what_cannot_be_written_down_is_not_repeated(run):
    ledger_path(run).symlink_to("/dev/full")
    for _ in range(2):  # for ever, if it were
        found = settle(run, failed(1, 7), 3)
        assert found.exit_code == 1
        assert "No space left" in found.reason


def test_nodes_that_became_suspect_stay_excluded(run):
    ecc = {"error_message": "uncorrectable ECC error", "nodes": ("n1", "n2")}
    assert settle(run, failed(1, 3, node="n2", **ecc), 3).exclude == ("n2",)
    assert settle(run, failed(2, 5, node="n1", **ecc), 3).exclude == ("n2", "n1")
    assert excluded(run) == ["n2", "n1"]


@pytest.mark.parametrize("ended", [Ended(2, "stopped", 75, stop_reason="gradus runs stop"), failed(2, exit_code=93)])
def test_who_starts_a_run_again_by_hand_has_all_retries(run, ended):
    settle(run, failed(1, 7), 3)
    settle(run, ended, 3)
    assert history(run) == []
    assert settle(run, failed(3, 7), 3).decision == "again"


# -- how an attempt ended, from its files -----------------------------------------------------------------------------


def begun_attempt(run: RunDirectory, begun: int = 0, reached: int = 0) -> int:
    attempt = run.new_attempt({"recipe.yaml": ""})
    events = EventWriter(run, rank_writer(attempt))
    events.write("start", attempt=attempt, step=begun)
    metrics = AppendLog(run.metrics_path)
    for step in range(begun + 1, reached + 1):
        metrics.write({"step": step, "attempt": attempt})
    return attempt


def test_an_attempt_that_nobody_wrote_the_end_of_is_lost(run):
    attempt = begun_attempt(run, reached=7)
    checkpoint(run, 5)
    found = attempt_ended(run, attempt, nodes=("n1",), job_id="8", lost_node="n1")
    assert (found.state, found.exit_code, found.node, found.job_id) == ("lost", None, "n1", "8")
    assert (found.step_begun, found.step_reached, found.step_saved) == (0, 7, 5)


def test_a_failure_is_told_as_its_rank_left_it(run):
    attempt = begun_attempt(run, begun=5, reached=7)
    error = {"kind": "exception", "message": "ValueError: 12 at 0x7f", "rank": 3, "node": "n2"}
    write_outcome(run, attempt, {"state": "failed", "exit_code": 1, "error": error})
    found = attempt_ended(run, attempt, nodes=("n1", "n2"))
    assert (found.state, found.rank, found.node, found.step_begun, found.step_reached) == ("failed", 3, "n2", 5, 7)
    assert found.error_signature == "exception: ValueError: # at ADDRESS"


def test_steps_that_were_made_but_not_logged_are_told_by_the_rank_that_failed(run):
    attempt = begun_attempt(run, begun=5, reached=6)
    error = {"kind": "exception", "message": "no", "rank": 3, "node": "n2", "steps_made": 7}
    write_outcome(run, attempt, {"state": "failed", "exit_code": 1, "error": error})
    assert attempt_ended(run, attempt).step_reached == 7


def test_the_launcher_has_the_last_word_on_how_it_ended(run):
    attempt = begun_attempt(run)
    write_outcome(run, attempt, {"state": "stopped", "exit_code": 75, "reason": "SIGUSR1", "step": 3})
    told = {"state": "failed", "exit_code": 1, "error": {"kind": "rank-died", "message": "rank 1 died"}}
    assert attempt_ended(run, attempt).stop_reason == "SIGUSR1"
    assert attempt_ended(run, attempt, told).error_kind == "rank-died"


def test_an_attempt_that_never_began_is_where_the_run_was_saved(run):
    begun_attempt(run, reached=9)
    checkpoint(run, 5)
    found = attempt_ended(run, run.new_attempt({"recipe.yaml": ""}))
    assert (found.step_begun, found.step_reached) == (5, 5)


def test_the_one_node_that_left_no_word_is_the_cause_of_lost_peers_and_of_nothing_else(run):
    attempt = begun_attempt(run)

    def told(kind: str) -> Ended:
        error = {"kind": kind, "message": "as rank 0 sees it", "rank": 0, "node": "n1"}
        outcome = {"state": "failed", "exit_code": 1, "error": error}
        return attempt_ended(run, attempt, outcome, nodes=("n1", "n2"), lost_node="n2")

    assert (told("lost-peer").error_kind, told("lost-peer").node) == ("node-lost", "n2")
    assert settle(run, told("lost-peer"), 3).exclude == ("n2",)
    assert (told("exception").error_kind, told("exception").node) == ("exception", "n1")


def test_a_failed_attempt_is_not_credited_with_the_step_in_the_status_of_the_one_before(run):
    begun_attempt(run, reached=9)
    attempt = run.new_attempt({"recipe.yaml": ""})
    assert attempt_ended(run, attempt, {"state": "failed", "exit_code": 1, "step": 9}).step_reached == 0


def test_a_foreign_script_does_not_say_how_far_it_got_and_an_own_loop_does(run):
    attempt = run.new_attempt({"command.json": "{}"})
    assert not attempt_ended(run, attempt).counts_steps
    run.own_loop_mark(attempt).touch()
    assert attempt_ended(run, attempt).counts_steps


def test_the_same_crash_from_the_files_of_two_attempts_is_given_up(run):
    """With a checkpoint between the start and the crash, the second attempt makes fewer steps to the same place."""
    trace = 'File "/home/me/model.py", line 12, in forward\n'
    for attempt, begun in ((1, 0), (2, 5)):
        begun_attempt(run, begun, reached=6)
        if attempt == 1:
            checkpoint(run, 5)
        error = {"kind": "exception", "message": f"bad {attempt}", "traceback": trace, "rank": 0, "node": "n1"}
        write_outcome(run, attempt, {"state": "failed", "exit_code": 1, "error": error})
    assert settle(run, attempt_ended(run, 1, nodes=("n1", "n2")), 3).exit_code == 10
    assert settle(run, attempt_ended(run, 2, nodes=("n1", "n2")), 3).exit_code == 93


def test_an_attempt_without_a_line_is_unsettled_until_it_has_one(run):
    assert unsettled(run) is None
    attempt = begun_attempt(run, reached=3)
    assert unsettled(run) == attempt
    settle(run, attempt_ended(run, attempt), 3)
    assert unsettled(run) is None


def test_an_attempt_of_gradus_train_is_not_the_ledgers(run):
    attempt = begun_attempt(run, reached=3)
    EventWriter(run, f"launcher-attempt-{attempt}").write("end", attempt=attempt, state="stopped", exit_code=75)
    assert unsettled(run) is None
