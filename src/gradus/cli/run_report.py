"""How a run ended, for people and as JSON: the same after `gradus train` and after `gradus submit --wait`."""

from __future__ import annotations

import math
import sys

from gradus.cli.output import print_error, shown
from gradus.launcher.ending import last_validation
from gradus.launcher.result import Result
from gradus.record.events import rank_writer, read_events
from gradus.record.format import duration_text
from gradus.record.summary import summarize, summary_text
from gradus.schema.recipe import Recipe

_FAR_ABOVE = 2.0  # times the first loss: single losses are noisy, and less may be one hard batch


def exit_code(result: Result) -> int:
    assert result.exit_code is not None, "the run has ended"
    return result.exit_code


def run_document(result: Result) -> dict[str, object]:
    return {**result.document(), **last_validation(result.run)}


def report_recipe(result: Result, recipe: Recipe, recipe_path: str | None, again: str = "train --resume") -> None:
    """On stdout. `again` is the verb that goes on with a run that was stopped."""
    if not told_of_failure(result):
        print(summary_text(result.run, _next_steps(result, recipe, recipe_path)))
        if result.state == "finished" and result.reason and not result.reason.endswith(("step done", "steps done")):
            print(f"\nfinished early: {result.reason}")
        if result.state == "finished" and _was_finished(result):
            print(f"\nwas finished already at step {result.step}: nothing was left to do")
        if result.state == "stopped":
            print(f"\nstopped on request ({result.reason}) and saved at step {result.step}; continue with")
            print(f"  gradus {again} {shown(result.run.path)}")


def _was_finished(result: Result) -> bool:
    """Whether the last attempt found nothing left to do."""
    writer = rank_writer(max(result.run.attempts, default=0))
    begun = [event for event in read_events(result.run) if event.get("writer") == writer]
    resumed = [event["step"] for event in begun if event.get("event") == "resume" and "step" in event]
    return bool(resumed) and resumed[-1] == result.step > 0


def report_script(result: Result, again: str = "train --resume") -> None:
    """On stderr: stdout is the script's own."""
    if told_of_failure(result):
        return
    if result.metrics:  # an own loop
        print(summary_text(result.run), file=sys.stderr)
    else:
        seconds = summarize(result.run).wall_seconds
        spent = f" after {duration_text(seconds)}" if seconds is not None else ""
        print(f"{result.state}{spent}: run {shown(result.run.path)}", file=sys.stderr)
    if result.state == "stopped":
        saved = f"saved at step {result.step}" if result.metrics else "whether it saved is up to the script"
        print(f"stopped on request ({result.reason}); {saved}; continue with", file=sys.stderr)
        print(f"  gradus {again} {shown(result.run.path)}", file=sys.stderr)


def told_of_failure(result: Result, *, kept: bool = True) -> bool:
    for problem in result.problems:
        print(f"warning: {problem}", file=sys.stderr)
    if result.error is None:
        return False
    print_error(result.error)  # last, where the eye is
    if result.step and kept:
        print(f"run: {shown(result.run.path)}, which got to step {result.step}", file=sys.stderr)
    return True


def _next_steps(result: Result, recipe: Recipe, recipe_path: str | None) -> list[str]:
    if result.state != "finished":
        return []
    runs, explain = f"gradus runs {shown(result.run.path)}", f"gradus explain {shown(result.run.path)}"
    tries = [(runs, "what happened in this run")]
    if _ran_away(result):
        tries.insert(0, (explain, "why the loss ended far above its beginning, and the exact change"))
    else:
        if recipe_path:
            half = f"optimizer.lr={recipe.optimizer.lr / 2:g}"
            tries.append((f"gradus train {recipe_path} --set {half}", "the same with half the learning rate"))
        tries.append((explain, "what slowed it down, and the exact change"))
    width = max(len(command) for command, _ in tries)
    return [f"{command:<{width}}   {why}" for command, why in tries]


def _ran_away(result: Result) -> bool:
    """Whether half the learning rate may be far too much still."""
    found = summarize(result.run)
    if found.first_loss is None or found.last_loss is None:
        return False
    rise = found.last_loss - found.first_loss
    return not math.isfinite(found.last_loss) or rise > (_FAR_ABOVE - 1) * abs(found.first_loss)
