"""A profile of a foreign script: its ranks find a sitecustomize of ours on their path, which waits for their steps."""

from __future__ import annotations

import os
from pathlib import Path

from gradus.launcher.attempt import Launch
from gradus.schema.profile_request import PROFILE_FILE

_INJECTED = Path(__file__).parents[1] / "training" / "profiled_script"


def script_profile_variables(launch: Launch) -> dict[str, str]:
    """Nothing unless the attempt is a script's and asks for a profile."""
    if launch.script is None or not (launch.run.attempt_path(launch.attempt) / PROFILE_FILE).exists():
        return {}
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(_INJECTED), *([before] if before else [])])}
