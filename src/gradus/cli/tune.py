"""`gradus tune`: measure the knobs of a plan, keep what helps, and write the plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradus.cli.bench_output import check_html, finish, progress
from gradus.cli.output import print_json, shown
from gradus.record.format import rate_text
from gradus.schema.errors import EXIT_FINISHED, InputError, unknown_name

if TYPE_CHECKING:
    from gradus.bench.tune import Tuned


@dataclass(frozen=True)
class TuneOptions:
    """What was typed after `gradus tune`."""

    recipe: str
    cluster: str | None = None
    nproc: int | None = None
    minutes: float = 10.0
    overrides: tuple[str, ...] = ()
    knobs: str | None = None
    out: str | None = None
    repeats: int = 3
    seconds: float = 3.0
    trial_seconds: float = 300.0
    memory_gib: float | None = None
    look: bool = True
    html: str | None = None
    as_json: bool = False


def tune_command(options: TuneOptions) -> int:
    from gradus.bench.tried import Ranks
    from gradus.bench.tried_recipe import given, plan_here
    from gradus.bench.tune import Tuner
    from gradus.bench.tune_knobs import KNOBS

    check_html(options.html)
    knobs = [name.strip() for name in options.knobs.split(",")] if options.knobs else None
    for name in knobs or ():
        if name not in KNOBS:
            raise unknown_name("knob", name, KNOBS, field="--knobs")
    _check_out(options)
    recipe = given(options.recipe, None, options.overrides)
    choice, cluster = plan_here(recipe, options.nproc, options.cluster)
    with Ranks(choice.plan.mesh.world_size) as ranks:
        tuner = Tuner(
            recipe,
            choice,
            cluster,
            ranks,
            say=progress,
            minutes=options.minutes,
            repeats=options.repeats,
            seconds=options.seconds,
            trial_seconds=options.trial_seconds,
            memory_bytes=round(options.memory_gib * 2**30) if options.memory_gib is not None else None,
        )
        tuned = tuner.tuned(knobs, look=options.look)
    if options.out is not None:
        Path(options.out).write_text(tuned.plan.to_yaml(tuned.reasons), encoding="utf-8")
    if not options.as_json:
        _print(tuned, options)
    if options.html is not None:
        finish(tuned.result(), False, options.html, False)
    if options.as_json:
        print_json({**tuned.document(), "out": options.out, "exit_code": EXIT_FINISHED})
    return EXIT_FINISHED


def _check_out(options: TuneOptions) -> None:
    """Before anything is measured. The recipe is the user's, and is never written."""
    if options.out is None:
        return
    out = Path(options.out)
    allowed = "the name of a new file, or of a plan"
    if out.is_dir() or not out.absolute().parent.is_dir():
        found = "which is a folder" if out.is_dir() else "whose folder is not there"
        raise InputError(f"--out: found {out}, {found}", field="--out", found=str(out), allowed=allowed)
    if out.exists() and out.samefile(options.recipe):
        raise InputError(f"--out: found {out}, which is the recipe", field="--out", found=str(out), allowed=allowed)


def _print(tuned: Tuned, options: TuneOptions) -> None:
    from gradus.bench.tune import step_text

    print(f"{tuned.recipe.name}: {tuned.plan.mesh}, batch {tuned.recipe.batch}; measured here in {tuned.seconds:.0f} s")
    for step in tuned.steps:
        print(f"  {step.knob:<14}{step_text(step)}")
    for note in tuned.notes:
        print(f"note: {note}")
    kept = [step.factor for step in tuned.steps if step.kept and step.factor is not None]
    if tuned.measured is not None:
        assert tuned.start_rate is not None
        assert tuned.rate is not None
        product = " × ".join(f"{factor:.2f}" for factor in kept)
        print(
            f"factors multiply to {tuned.composed:.2f}× ({product}), measured end to end {tuned.measured:.2f}× "
            f"±{tuned.noise or 0.0:.0%}: {rate_text(tuned.start_rate, 'samples')} → {rate_text(tuned.rate, 'samples')}"
        )
    elif kept:
        print(f"factors multiply to {tuned.composed:.2f}×; not measured end to end")
    if not tuned.changes:
        print("nothing that was tried is faster than the planner's plan")
    else:
        print("for the recipe:\nplan:")
        for name, value in tuned.changes.items():
            text = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
            print(f"  {name}: {text}")
    if options.out is not None:
        print(f"the whole plan, each choice with its reason, is in {shown(Path(options.out))}")
