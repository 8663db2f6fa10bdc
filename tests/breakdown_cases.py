"""What the pool's processes do in tests of where the time of steps goes."""

from __future__ import annotations

from typing import Any

from training_cases import live_run

from gradus.parallel.world import World
from gradus.schema.recipe import Recipe
from gradus.training.loop import train


def timed(world: World, folder: str, recipe: Recipe) -> dict[str, Any]:
    """Train; what could not be written, and the phases that this rank's clock was in."""
    live = live_run(world, folder, recipe, 1, None)
    ending = train(live)
    return {"state": ending.state, "lost": live.recorder.close(state=ending.state)}
