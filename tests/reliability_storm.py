"""A storm of SIGKILLs: everything of a run dies at once, again and again, at random moments and at chosen ones."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path

from reliability_place import Outcome, Place, Started, commits, curve, misbehaving, resumed_steps, saved

from gradus.checkpoint.manifest import COMMITTED, MANIFEST
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics

STEPS_PER_KILL = 10  # a run must not be over before it was killed as often
MISSED_STEPS = 20  # after which the moment has not come, or was not seen
OFTEN = 0.001  # seconds between two looks, where a moment is short
PHASES = ("step", "writing", "committing", "pruning", "staging", "starting")
# Each moment of a save is there to be hit for some hundredths of a second, also on a disk that is faster than that.
SLOWER = """
def slowed(real, seconds, only=""):
    def slow(*given, **named):
        if only in str(given[0]):
            time.sleep(seconds)
        return real(*given, **named)
    return slow
if 'gradus.checkpoint.writer_process' in ' '.join(sys.orig_argv):
    os.fsync, os.rmdir = slowed(os.fsync, 0.02), slowed(os.rmdir, 0.05)
os.replace = slowed(os.replace, 0.2, "/staged/")
"""


def unfinished(run: RunDirectory, staged: Path) -> dict[str, bool]:
    """What the folders show about what was going on, or is: whatever is listed may be gone a moment later."""
    folders = {folder: _names(folder) for folder in run.checkpoints.glob("step-*")}
    kept = [names for folder, names in folders.items() if not folder.name.endswith(".removed")]
    return {
        "pruning": len(kept) < len(folders),
        "committing": any(MANIFEST in names and COMMITTED not in names for names in folders.values()),
        "writing": any(name.endswith(".partial") for names in kept for name in names),
        "staging": any(n[0] == "." and n.endswith(".partial") for _, _, names in os.walk(staged) for n in names),
    }


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:  # removed or renamed since it was listed
        return []


def kill_storm(place: Place, kills: int, seed: int, ranks: int) -> Outcome:
    draw = random.Random(seed)
    name = f"storm-{ranks}"
    run, staged = place.run(name), place.folder / name / "staged"
    steps = STEPS_PER_KILL * kills
    settings = ("checkpoint.every=3", "plan.workers=1")
    packed = place.packed(f"{name}-data", texts=20, lines=400)
    expected = place.undisturbed(steps, *settings, f"data={{use: shards, path: {packed}}}", ranks=ranks)
    slower = misbehaving(place, name, SLOWER, everywhere=True)
    aims = [PHASES[number % len(PHASES)] for number in range(kills)]
    draw.shuffle(aims)
    phases: Counter[str] = Counter()
    lost_most = resumes = 0
    newest: int | None = None

    def start() -> Started:
        if run.path.exists() and run.attempts:
            return place.start("--resume", str(run.path), ranks=ranks, PYTHONPATH=slower)
        data = f"data={{use: shards, path: {packed}, stage: {staged}}}"
        return place.begin(name, steps, *settings, data, ranks=ranks, PYTHONPATH=slower)

    for aim in aims:
        if aim == "staging":
            shutil.rmtree(staged, ignore_errors=True)  # as on a node on which nothing is yet
        earlier, begun, was = len(resumed_steps(run)), _logged(run), unfinished(run, staged)["staging"]
        process = start()
        _wait_for(aim, process, run, staged, begun, draw)
        if process.poll() is not None:
            raise AssertionError(f"ended before it was killed: {process.communicate()[0]}\n{process.said.read_text()}")
        process.kill_all()
        # What it went on from is the newest commit that the last kill left, whole.
        went_on = resumed_steps(run)[earlier:]
        assert went_on in ([], [newest] if newest is not None else []), f"{went_on}, not {newest}"
        resumes += len(went_on)
        there = saved(run)  # and every byte of each is as it was written
        before, newest = newest, max(there, default=None)
        assert (newest or 0) >= max(before or 0, *commits(run), 0), "something was lost that was committed"
        stepped = _logged(run) > begun
        if stepped:
            lost_most = max(lost_most, read_metrics(run)[-1]["step"] - (newest or 0))
        shown = unfinished(run, staged)
        if stepped:  # what an earlier kill left was cleared away before
            phases[next((phase for phase in ("pruning", "committing", "writing") if shown[phase]), "step")] += 1
        else:
            phases["staging" if shown["staging"] and not was else "starting"] += 1
    earlier = len(resumed_steps(run))
    place.resume(run, ranks=ranks).end()
    assert resumed_steps(run)[earlier:] == [newest]
    assert curve(run) == expected
    audit = place.command("data", "audit", str(run.path))
    assert audit.returncode == 0, audit.stdout
    told = ", ".join(f"{phases[phase]} {_WORDS[phase]}" for phase in PHASES if phases[phase])
    return Outcome(
        f"{told}. Every checkpoint that was committed was whole after every kill; {resumes + 1} resumes, each from the "
        f"newest; the curve of {steps} steps is the undisturbed one bit for bit; `data audit` proves every sample",
        "the newest commit, each time",
        f"at most {lost_most}, those since the last commit",
    )


_WORDS = {
    "step": "during steps",
    "writing": "while a part was being written",
    "committing": "between manifest and commit",
    "pruning": "while an old one was being removed",
    "staging": "while data was being staged",
    "starting": "before the first step",
}


def _wait_for(aim: str, process: Started, run: RunDirectory, staged: Path, begun: int, draw: random.Random) -> None:
    """For the moment, or until it is past: a run that goes on for long would be over before its last kill."""
    if aim == "starting":
        process.when(lambda: _logged(run) > begun, draw.uniform(0.3, 4.0))
        return
    if aim == "staging":
        process.when(lambda: unfinished(run, staged)["staging"] or _logged(run) > begun, 60.0, OFTEN)
        return
    process.when(lambda: _logged(run) > begun)
    if aim == "step":
        more = begun + draw.randint(1, 6)
        process.when(lambda: _logged(run) >= more)
        time.sleep(draw.uniform(0.0, 0.03))
    else:
        process.when(lambda: unfinished(run, staged)[aim] or _logged(run) > begun + MISSED_STEPS, 3.0, OFTEN)


def _logged(run: RunDirectory) -> int:
    """Lines of the metrics, of all attempts."""
    return run.metrics_path.read_bytes().count(b"\n") if run.metrics_path.exists() else 0
