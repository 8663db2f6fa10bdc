"""By what the processes of an attempt know it, and are known: variables in their environment."""

from __future__ import annotations

RUN = "GRADUS_RUN"  # the run's directory
ATTEMPT = "GRADUS_ATTEMPT"
DRY_RUN = "GRADUS_DRY_RUN"  # "1": build everything, take one step and leave
