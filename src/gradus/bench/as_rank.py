"""A process as a rank of a benchmark: its world, its device, and how rank 0 says what it finds."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from gradus.parallel.world import World, alone, connected, store_from_environment
from gradus.record import strict_json
from gradus.record.format import first_line
from gradus.schema.errors import EXIT_FAILED, GradusError
from gradus.training.device import rank_device

# What is said goes where the starter reads. What a user's code prints is no part of it.
_SAID = os.fdopen(os.dup(1), "w", buffering=1)


def say(**known: Any) -> None:
    _SAID.write(strict_json.encode(known) + "\n")
    _SAID.flush()


@contextlib.contextmanager
def world_of_rank(ranks_per_gpu: int = 1) -> Iterator[World]:
    rank, local_rank, size = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))
    )
    device = rank_device(local_rank, ranks_per_gpu)
    if size == 1:
        yield alone(device)
        return
    store = store_from_environment()
    with connected(rank, local_rank, size, device, store, shares_gpu=ranks_per_gpu > 1) as world:
        yield world


def main(work: Callable[[Mapping[str, Any]], None]) -> None:
    """Do what the first argument asks for, say what goes wrong, and leave."""
    os.dup2(2, 1)  # from now on, anything that prints writes to stderr
    code = 0
    try:
        work(json.loads(sys.argv[1]))
    except GradusError as error:
        say(error=error.document(), exit_code=error.exit_code)
        code = error.exit_code
    except torch.OutOfMemoryError as error:
        hint = "use a smaller --batch-size, or --precision bf16"
        document = {"kind": "out-of-memory", "message": first_line(error), "hint": hint}
        say(error=document, exit_code=EXIT_FAILED)
        code = EXIT_FAILED
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = EXIT_FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without tearing torch down, whose threads now and then abort
