"""What is on the disk is damaged while nobody looks: bits, whole files, checkpoints, data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from reliability_place import BUDGET, EVERY, SAVED, Outcome, Place, curve, faults, flip, resumed_steps, saved

from gradus.checkpoint.manifest import COMMITTED, MANIFEST
from gradus.record.events import read_events
from gradus.record.metrics import read_metrics

NEWEST, OLDER = f"step-{SAVED:08d}", SAVED - EVERY


def passed_over(place: Place, name: str, damage: Callable[[Path], None], *, ranks: int = 1) -> Outcome:
    """Damage the newest checkpoint of a stopped run, and go on."""
    run = place.stopped(name, ranks=ranks)
    newest = run.checkpoints / NEWEST
    damage(newest)
    committed = (newest / COMMITTED).exists()
    verified = place.command("checkpoint", "verify", str(run.path), "--json")
    assert verified.returncode == (1 if committed else 0), verified.stdout
    place.resume(run, f"steps={BUDGET}", ranks=ranks).end()
    assert resumed_steps(run) == [OLDER]
    assert curve(run) == place.continued(ranks=ranks)
    assert saved(run) == [BUDGET - EVERY, BUDGET]
    told = faults(run, "damaged-checkpoint")
    if committed:
        assert len(told) == 1
        assert NEWEST in told[0]
        happened = "`checkpoint verify` names it (exit 1), an event does on resume, and it is passed over"
    else:
        notes = [event["message"] for event in read_events(run) if event["event"] == "checkpoint-note"]
        assert any(NEWEST in note for note in notes)
        happened = "it counts as never finished: cleared away on resume, with an event"
    return Outcome(f"{happened}; the curve is the undisturbed one bit for bit", f"{OLDER} of {SAVED}", str(EVERY))


def a_part(path: Path) -> Path:
    return min(path.glob("part-*"))


def flipped_tensor(place: Place) -> Outcome:
    return passed_over(place, "flipped-tensor", lambda path: flip(a_part(path), 0.7))


def flipped_header(place: Place) -> Outcome:
    return passed_over(place, "flipped-header", lambda path: flip(a_part(path), 0.0001))


def flipped_manifest(place: Place) -> Outcome:
    return passed_over(place, "flipped-manifest", lambda path: flip(path / MANIFEST))


def flipped_committed(place: Place) -> Outcome:
    return passed_over(place, "flipped-committed", lambda path: flip(path / COMMITTED))


def truncated(place: Place) -> Outcome:
    def cut(path: Path) -> None:
        os.truncate(a_part(path), a_part(path).stat().st_size - 4096)

    return passed_over(place, "truncated", cut)


def deleted_part(place: Place) -> Outcome:
    return passed_over(place, "deleted-part", lambda path: a_part(path).unlink())


def deleted_manifest(place: Place) -> Outcome:
    return passed_over(place, "deleted-manifest", lambda path: (path / MANIFEST).unlink())


def deleted_committed(place: Place) -> Outcome:
    return passed_over(place, "deleted-committed", lambda path: (path / COMMITTED).unlink())


def swapped_parts(place: Place) -> Outcome:
    def swap(path: Path) -> None:
        first, second = sorted(path.glob("part-*"))
        first.rename(path / "aside")
        second.rename(first)
        (path / "aside").rename(second)

    return passed_over(place, "swapped", swap, ranks=2)


def pickled(place: Place) -> Outcome:
    """A pickle that would leave a file behind if anybody opened it."""
    canary = place.folder / "canary"
    program = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()

    def replaced(kind: Callable[[Path], Path]) -> Callable[[Path], None]:
        return lambda path: kind(path).write_bytes(program) and None

    kinds = {"part": a_part, "manifest": lambda path: path / MANIFEST, "committed": lambda path: path / COMMITTED}
    for name, kind in kinds.items():
        outcome = passed_over(place, f"pickled-{name}", replaced(kind))
        assert not canary.exists()
    return Outcome(f"each: {outcome.happened}; nothing of it ran", outcome.resumed, outcome.lost)


def all_damaged(place: Place) -> Outcome:
    """On two ranks that hold a half each: one of them finds nothing wrong with what it reads."""
    run = place.stopped("all-damaged", "plan.zero=3", ranks=2)
    for path in run.checkpoints.glob("step-*"):
        flip(max(path.glob("part-*")), 0.7)
    place.resume(run, f"steps={BUDGET}", ranks=2).end()
    assert resumed_steps(run) == [0]
    assert len(faults(run, "damaged-checkpoint")) == 2
    assert [row["step"] for row in curve(run)] == list(range(1, BUDGET + 1))
    assert {row["attempt"] for row in read_metrics(run)} == {2}
    assert saved(run) == [BUDGET - EVERY, BUDGET]
    return Outcome("both are named in events, and the run begins again", "0: it starts over", str(SAVED))


def damaged_data(place: Place) -> Outcome:
    packed = place.packed("damaged-data", texts=10, lines=20)
    settings = (f"data={{use: shards, path: {packed}, verify: true}}",)
    (shard,) = packed.glob("*.tar")
    whole = shard.read_bytes()
    flip(shard, whole.index(b"text number 3") / len(whole))
    found = place.command("data", "verify", str(packed), "--json")
    assert found.returncode == 1
    (damage,) = json.loads(found.stdout)["damage"]
    failed = place.begin("damaged-shard", BUDGET, *settings).end(expect=1)
    assert shard.name in failed["error"]["message"], failed
    shard.write_bytes(whole)
    flip(packed / "index")
    assert place.command("data", "verify", str(packed)).returncode != 0
    refused = place.begin("damaged-index", BUDGET, *settings).end(expect=1)
    assert "index" in refused["error"]["message"], refused
    return Outcome(
        f"`data verify` names {damage['shard']} and sample {damage['sample']} (exit 1), and a run with `verify: true` "
        "ends with that; with a damaged index no run starts",
    )
