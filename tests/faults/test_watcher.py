"""The rank that watches over all tells of a hang with what is known of the rank that is behind; and watches end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_reports import report
from torch.distributed import HashStore

from gradus.faults.rank_report import Exchange
from gradus.faults.stack_files import StackFiles
from gradus.faults.watch import LOST_PEER_SECONDS, Watch
from gradus.faults.watchdog import Patience
from gradus.faults.watcher import Rank, Rhythm, Watcher
from gradus.faults.whereabouts import Whereabouts
from gradus.launcher.ledger import attempt_ended
from gradus.parallel.world import World, alone
from gradus.record.directory import RunDirectory
from gradus.record.outcome import read_outcome, write_outcome
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh
from gradus.training.leaving import tell_failure

QUICK = Rhythm(report_seconds=0.0, order_seconds=0.0, answer_seconds=0.2, commit_seconds=0.0, leave_seconds=0.0)
QUIET = Rhythm(report_seconds=0.1, order_seconds=0.05, answer_seconds=30.0)
AT_ONCE = Patience(after=0.0, at_least_seconds=-1.0, starting_seconds=-1.0)

Make = Callable[..., Watcher]


@pytest.fixture
def told() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def watcher(run: RunDirectory, told: list[dict[str, Any]]) -> Make:
    def make(ranks: int = 2, is_closed: bool = False) -> Watcher:
        world = World(0, 0, ranks, torch.device("cpu"), HashStore(), Mesh(replicate=ranks))
        where, attempt = Whereabouts(), run.new_attempt()
        stacks = StackFiles(run.attempt_path(attempt) / "stacks", 0, "n0", where, lambda: "")
        exchange = Exchange(HashStore(), ranks)

        def tell(event: str, **fields: Any) -> None:
            told.append({"event": event, **fields})

        def closed() -> bool:
            return is_closed

        def nothing() -> Path | None:
            return None

        rank = Rank(run, attempt, world, where, stacks, exchange, lambda: report(0), closed, nothing, tell)
        return Watcher(rank, AT_ONCE, QUICK)

    return make


def test_a_rank_that_never_said_anything_speaks_against_no_node(run, watcher, told):
    """Its node is not known, and a name that is none would end in a request for nodes that Slurm refuses."""
    assert watcher().look({0: report(0)})
    assert [(one["event"], one["rank"], one["node"]) for one in told] == [("fault", 1, None)]
    assert "rank 1 on an unknown node is behind: it has never said anything" in told[0]["message"]
    ended = attempt_ended(run, 1, read_outcome(run, 1), nodes=("n0", "n1"))
    assert (ended.error_kind, ended.suspect) == ("hang", None)


def test_a_rank_that_says_nothing_is_named_with_its_node(watcher, told):
    assert watcher().look({0: report(0), 1: report(1, node="n7", waiting_seconds=3.0)})
    assert [(one["rank"], one["node"]) for one in told] == [(1, "n7")]


def test_one_that_is_about_to_end_tells_of_nothing(watcher, told):
    assert not watcher(is_closed=True).look({0: report(0), 1: report(1)})
    assert told == []


def test_a_closed_watch_holds_nothing_of_its_run(run):
    """Whoever keeps it, in a notebook or an error, must not thereby keep a model, and the process group of that."""
    model = torch.nn.Linear(1, 1)

    def tell(model: torch.nn.Module, *event: Any, **fields: Any) -> None:
        pass

    def being_written(model: torch.nn.Module) -> Path | None:
        return None

    watch = Watch(
        *(run, run.new_attempt(), alone(torch.device("cpu")), partial(tell, model), Patience.of(None)),
        being_written=partial(being_written, model),
    )
    kept = weakref.ref(model)
    del model
    assert kept() is not None
    watch.close()
    gc.collect()
    assert kept() is None
    watch.explain(ValueError("after it, as when a script ends"))


def test_a_rank_that_lost_a_peer_leaves_the_word_to_the_one_whose_collective_timed_out(run):
    """The first that gives up closes its connections: to tell of that would hide for whom everybody waits."""
    attempt, store = run.new_attempt(), HashStore()
    world = World(1, 1, 3, torch.device("cpu"), store, Mesh(replicate=3))
    watch = Watch(run, attempt, world, lambda *event, **fields: None, Patience.of(None), rhythm=QUIET)
    lost = ValueError("hooks: mine.py:Hook, in on_step, raised RuntimeError")
    lost.__cause__ = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35206")
    explained = threading.Thread(target=watch.explain, args=(lost,))
    explained.start()
    Exchange(store, 3).suspect("a collective timed out on rank 0")
    explained.join(QUIET.report_seconds + LOST_PEER_SECONDS + 0.5)
    assert explained.is_alive()
    write_outcome(run, attempt, {"state": "failed", "exit_code": 1, "error": {"kind": "hang", "rank": 2}})
    explained.join(5.0)
    assert not explained.is_alive()
    tell_failure(run, attempt, lost, rank=1)
    assert (read_outcome(run, attempt) or {})["error"]["rank"] == 2
    watch.close()


def test_a_lost_peer_that_nobody_explains_is_told_as_such_and_not_as_the_users_mistake(run, monkeypatch):
    monkeypatch.setattr("gradus.training.leaving._WAIT_FOR_CAUSE_SECONDS", 0.0)
    attempt = run.new_attempt()
    error = InputError("raised RuntimeError", field="hooks")
    error.__cause__ = RuntimeError("Connection reset by peer")
    tell_failure(run, attempt, error, rank=1)
    outcome = read_outcome(run, attempt) or {}
    assert (outcome["exit_code"], outcome["error"]["kind"]) == (1, "lost-peer")
