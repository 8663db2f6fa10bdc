"""Watchdog: for how long a run may stand still, and who is behind when it does."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from rank_reports import report, reports
from torch.distributed import PrefixStore, TCPStore

from gradus.faults import silence
from gradus.faults.from_outside import state_of
from gradus.faults.rank_report import Exchange, RankReport, own_connection
from gradus.faults.silence import Silence
from gradus.faults.stacks import compiles_or_debugs, main_frame, place_of, waits
from gradus.faults.watchdog import Patience, Stall, Told, behind, is_collective_timeout, phases_known
from gradus.faults.whereabouts import Whereabouts
from gradus.record.outcome import read_outcome
from gradus.record.status import Status, write_status
from gradus.schema.recipe import Recipe

PATIENCE = Patience(after=10.0, at_least_seconds=120.0, starting_seconds=1500.0)


def whereabouts(steps: list[float], batches: list[float]) -> Whereabouts:
    where = Whereabouts()
    where.step_seconds.extend(steps)
    where.batch_seconds.extend(batches)
    return where


def test_patience_is_some_median_steps_but_never_less_than_the_least():
    assert PATIENCE.seconds(["data", "forward-backward"], whereabouts([0.1, 0.2, 9.0], [])) == 120.0
    assert PATIENCE.seconds(["data", "forward-backward"], whereabouts([20.0, 30.0, 90.0], [])) == 300.0


def test_what_has_no_measure_gets_the_longer_patience_also_if_only_one_rank_is_in_it():
    where = whereabouts([0.1], [])
    for phase in ("building", "staging", "loading", "saving", "compiling", "hooks", "own-code"):
        assert PATIENCE.seconds(["forward-backward", phase], where) == 1500.0, phase
    assert PATIENCE.seconds(["forward-backward"], whereabouts([], [])) == 1500.0, "the first step compiles"
    assert PATIENCE.seconds(["evaluating"], where) == 1500.0, "so does the first batch of an evaluation"
    assert PATIENCE.seconds(["evaluating"], whereabouts([0.1], [40.0])) == 400.0


def test_a_debugger_and_a_run_without_watchdog_have_all_the_time():
    where = whereabouts([0.1], [])
    assert PATIENCE.seconds(["debugging", "forward-backward"], where) == math.inf
    assert Patience.of(None).seconds(["forward-backward"], where) == math.inf


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", None),
        ("false", None),
        ("{}", (10.0, 300.0, 1500.0)),
        ("{after: 3, at_least: 90s, starting: 1h}", (3.0, 90.0, 3600.0)),
    ],
)
def test_a_recipe_sets_it_or_switches_it_off(text, expected):
    document = {"name": "a", "batch": 1, "steps": 1, "watchdog": yaml.safe_load(text)}
    found = Recipe.from_document(yaml.safe_load(Recipe.from_document(document).to_yaml())).watchdog
    assert Patience.of(found) == Patience(*(expected or (math.inf,) * 3))


def test_any_rank_that_comes_on_ends_a_stall():
    stall = Stall(look_every_seconds=5.0)
    for now in (0.0, 5.0, 10.0):
        stall.look(reports(2), now)
    assert stall.seconds == 10.0
    stall.look(reports(2, r1={"moves": 401}), 15.0)
    assert stall.seconds == 0.0


def test_time_in_which_the_watchdog_itself_was_suspended_does_not_count():
    stall = Stall(look_every_seconds=5.0)
    stall.look(reports(2), 0.0)
    stall.look(reports(2), 8 * 3600.0)
    assert stall.seconds <= 15.0


def test_a_rank_whose_reports_stay_away_is_silent_unless_it_said_that_it_is_over():
    stall = Stall(look_every_seconds=5.0)
    for number in range(14):
        told = {0: report(0, number=number), 1: report(1), 2: report(2, phase="over")}
        stall.look(told, 5.0 * number)
    assert stall.silent(told, 60.0) == {1}


def test_what_a_rank_did_long_before_it_fell_silent_does_not_count():
    told = reports(3, r1={"phase": "building", "step": 0}, r2={"phase": "saving", "step": 38})
    assert sorted(phases_known(told, {1, 2})) == ["forward-backward", "saving"]
    assert len(phases_known(told, set())) == 3


def test_the_one_that_does_not_wait_is_behind():
    found = behind(reports(4, r2={"waiting_seconds": None}), set(), {2: Told(2, "user.py:7 in forward")})
    assert (found.rank, found.node) == (2, "n1")
    assert found.how == "in the forward or backward pass of step 41 for 300 s, at user.py:7 in forward"


def test_one_that_waits_by_its_stack_waits_though_it_does_not_know():
    told = {0: Told(0, waits=True), 1: Told(1, waits=True)}
    unknown = {f"r{rank}": {"waiting_seconds": None} for rank in range(3)}
    assert behind(reports(3, **unknown), set(), told).rank == 2


def test_one_that_says_nothing_comes_before_all_others():
    told = {3: Told(3, state="its process is stopped (SIGSTOP)")}
    found = behind(reports(4, r2={"waiting_seconds": None}), {3}, told)
    assert found.rank == 3
    assert found.how.startswith("its process is stopped (SIGSTOP)")


def test_where_all_wait_it_is_the_one_whose_gpu_was_given_fewer_collectives_or_that_has_made_fewer_steps():
    told = {rank: Told(rank, collectives=900 if rank != 1 else 899) for rank in range(3)}
    assert behind(reports(3), set(), told).rank == 1
    assert behind(reports(3, r2={"step": 38}), set(), {}).rank == 2


def test_one_that_is_over_is_not_behind():
    over = {"phase": "over", "waiting_seconds": None, "step": 3}
    assert behind(reports(3, r0=over, r2={"waiting_seconds": None}), set(), {}).rank == 2


def test_a_run_of_one_rank_names_it():
    found = behind({0: report(0)}, set(), {0: Told(0, "user.py:7 in forward")})
    assert (found.rank, found.how[:30]) == (0, "in the forward or backward pas")


def test_timeouts_of_collectives_are_told_from_those_of_user_code():
    gloo = RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation")
    assert is_collective_timeout(gloo)
    wrapped = ValueError("hooks: mine.py:Hook, in on_step, failed")
    wrapped.__cause__ = gloo
    assert is_collective_timeout(wrapped)
    assert not is_collective_timeout(RuntimeError("request timed out"))
    assert not is_collective_timeout(RuntimeError("gloo: connection closed by peer"))


def test_a_thread_that_waits_with_the_store_does_not_hold_reports_up():
    store = PrefixStore("run", TCPStore("127.0.0.1", 0, is_master=True))
    exchange = Exchange(store, 2)
    ended = threading.Event()

    def wait_for_it() -> None:
        store.wait(["something"], timedelta(seconds=60))
        ended.set()

    waiting = threading.Thread(target=wait_for_it, daemon=True)
    waiting.start()
    time.sleep(0.2)  # until it waits
    exchange.say(report(0))
    assert exchange.reports() == {0: report(0)}, "that of the rank that has said something"
    exchange.say(replace(report(1), own_seconds=0.25))
    assert exchange.reports()[1].own_seconds == 0.25
    assert exchange.order() is None
    assert not ended.is_set()
    own_connection(store).set("something", "")
    assert ended.wait(60)


def test_a_report_is_the_same_after_the_store():
    one = replace(report(3), own_seconds=0.1, data_seconds=0.01, memory_peak_bytes=5, kind=2)
    assert RankReport.from_json(one.to_json()) == one


def test_the_place_is_the_users_innermost_line_and_not_that_of_a_library():
    frames = []

    def watching() -> None:
        time.sleep(0.3)
        frames.append(main_frame())
        frames.append(place_of(frames[0]))
        frames.append((waits(frames[0]), compiles_or_debugs(frames[0])))

    thread = threading.Thread(target=watching)
    thread.start()
    thread.join()  # from here on, this is the innermost line of this file
    assert frames[1].startswith(f"{__file__}:")
    assert frames[1].endswith(" in test_the_place_is_the_users_innermost_line_and_not_that_of_a_library")
    assert frames[2] == (False, None)


def test_the_launcher_notices_a_rank_0_that_is_stopped_and_does_not_blame_a_suspended_machine(run, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(silence.time, "monotonic", lambda: clock[0])
    recipe = Recipe.from_document({"name": "a", "batch": 1, "steps": 1, "watchdog": {"at_least": "2m"}})
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        attempt = run.new_attempt()
        watching = Silence(run, attempt, recipe, ranks=1)
        for step in range(4):
            clock[0] += 5.0
            write_status(
                run, Status("running", step, attempt=attempt, host=silence.socket.gethostname(), pid=process.pid)
            )
            assert not watching.noticed()
        clock[0] += 8 * 3600.0
        assert not watching.noticed(), "nobody ran meanwhile"
        noticed = []
        while not noticed or not noticed[-1]:
            clock[0] += 5.0
            noticed.append(watching.noticed())
        assert 30 <= len(noticed) <= 37  # 3 minutes, less what counts of the night
        error = read_outcome(run, attempt)["error"]
        assert (error["kind"], error["rank"]) == ("hang", 0)
        assert "its process is stopped (SIGSTOP)" in error["message"]
        assert state_of(process.pid) in (run.path / error["stacks"]).read_text()
        never = Silence(run, attempt, recipe.model_copy(update={"watchdog": None}), ranks=1)
        clock[0] += 5.0
        assert not never.noticed()
    finally:
        process.kill()
        process.wait()


STANDS_STILL = """
import sys, time
from pathlib import Path
import torch
from gradus.faults.watch import Watch
from gradus.faults.watchdog import Patience
from gradus.parallel.world import alone
from gradus.record.directory import RunDirectory

run = RunDirectory.create(Path(sys.argv[1]), "run")
watch = Watch(run, run.new_attempt(), alone(torch.device("cpu")), lambda *a, **k: None, Patience(2.0, 0.2, 0.2))
deadline = time.monotonic() + 60
while watch._thread.is_alive() and time.monotonic() < deadline:
    time.sleep(0.1)
print("still here", run.outcome_path(1).exists())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("marked", "code", "said"), [({}, 0, "still here True"), ({"GRADUS_RUN": "r"}, 1, "")])
def test_only_a_process_that_is_a_rank_and_nothing_else_is_ended(
    tmp_path: Path, marked: dict[str, str], code: int, said: str
) -> None:
    """A notebook, a server or a test in which a run hangs is told of it, and lives on."""
    variables = {name: value for name, value in os.environ.items() if name not in ("GRADUS_RUN", "TORCHELASTIC_RUN_ID")}
    done = subprocess.run(
        [sys.executable, "-c", STANDS_STILL, str(tmp_path)],
        env={**variables, **marked},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (code, said), done.stderr
