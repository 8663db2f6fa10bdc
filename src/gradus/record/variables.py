"""By what the processes of an attempt know it, and are known: variables in their environment."""

from __future__ import annotations

RUN = "GRADUS_RUN"  # the run's directory
ATTEMPT = "GRADUS_ATTEMPT"
DRY_RUN = "GRADUS_DRY_RUN"  # "1": build everything, take one step and leave
OWN = "own"
BIND = "GRADUS_BIND"  # "1": each rank keeps to its share of the node's cores; OWN: those that it has are its own
GPU = "GRADUS_GPU"  # OWN: the one GPU that this rank sees is for it alone
PARENT_RANKS = "GRADUS_PARENT_RANKS"  # how many ranks the process has that started this one; else all of the node
ARGUMENTS = "GRADUS_ARGUMENTS"  # all arguments of a script, as JSON, where some look like secrets: no file has those
DEADLINE = "GRADUS_DEADLINE"  # when the run must be over and saved, in seconds since 1970
