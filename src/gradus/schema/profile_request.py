"""ProfileRequest: which steps of which ranks are to be recorded by torch's profiler, as typed after --profile."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from gradus.schema.errors import InputError, unknown_name

PROFILE_FILE = "profile.json"  # in the folder of an attempt
FIELD = "--profile"
_KEYS = ("steps", "from", "ranks", "stacks", "memory")
_EXAMPLE = "--profile steps=5,from=20,ranks=0,stacks"
_MOST_STEPS = 1000  # a trace of so many is larger than anybody opens
WARM_UP = 10  # steps after which a run has compiled, filled its caches and found its pace
SCRIPT_WARM_UP = 5  # of a script, of which nobody knows how many steps it makes
FEW_RANKS = 4


@dataclass(frozen=True)
class ProfileRequest:
    steps: int = 5
    first: int | None = None  # step, from 1; None: after the warm-up, or earlier if the run is short
    ranks: tuple[int, ...] | None = None  # None: rank 0, and the others where there are few; empty: all
    stacks: bool = False
    memory: bool = False

    @classmethod
    def parse(cls, text: str) -> ProfileRequest:
        """From `steps=5,from=10,ranks=0,1,stacks,memory`; ranks may also be written 0+1, or all."""
        found: dict[str, str] = {}
        last = ""
        for part in (word.strip() for word in text.split(",")):
            key, equals, value = part.partition("=")
            if not equals and part.isdecimal() and last == "ranks":  # ranks=0,1
                found["ranks"] += f"+{part}"
                continue
            if not equals and part.isdecimal() and not found:  # --profile 5
                key, value = "steps", part
            if key not in _KEYS:
                raise unknown_name("setting", key, _KEYS, field=FIELD, hint=_EXAMPLE)
            if key in found:
                raise _bad(f"{key} is given twice", text)
            found[key], last = value, key
        for flag in ("stacks", "memory"):
            if found.get(flag, "") not in ("", "true", "false"):
                raise _bad(f"{flag} takes no value, found {found[flag]!r}", text)
        return cls(
            steps=_whole(found, "steps", 5, _MOST_STEPS),
            first=_whole(found, "from", None),
            ranks=_ranks(found.get("ranks")),
            stacks=found.get("stacks", "false") != "false",
            memory=found.get("memory", "false") != "false",
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ProfileRequest:
        document = json.loads(text)
        ranks = document.pop("ranks", None)
        return cls(ranks=None if ranks is None else tuple(ranks), **document)

    def wants(self, rank: int, world_size: int) -> bool:
        if self.ranks is None:
            return rank == 0 or world_size <= FEW_RANKS
        return not self.ranks or rank in self.ranks

    def window(self, done: int, total: int | None) -> range | None:
        """The steps (from 1) to record in an attempt that starts after `done` steps; None if there are none of them.

        Nobody knows the total of a script.
        """
        if self.first is not None:
            first = self.first
        elif total is None:
            first = done + SCRIPT_WARM_UP + 1
        else:
            # As late as the warm-up, but so that all of them fit; the first step of all only if there is no other.
            first = max(min(done + WARM_UP + 1, total - self.steps + 1), min(done + 2, total))
        last = first + self.steps - 1
        if total is not None:
            last = min(last, total)
        first = max(first, done + 1)
        return range(first, last + 1) if last >= first else None

    def check_ranks(self, world_size: int) -> None:
        beyond = [rank for rank in self.ranks or () if rank >= world_size]
        if beyond:
            raise _bad(
                f"ranks names rank {beyond[0]}, but there are {world_size}: 0 to {world_size - 1}", str(beyond[0])
            )

    def check_steps(self, total: int) -> None:
        if self.first is not None and self.first > total:
            raise _bad(f"from={self.first} is after the last of {total} steps", str(self.first))


def _whole(found: dict[str, str], key: str, default: int | None, most: int | None = None) -> Any:
    if key not in found:
        return default
    text = found[key]
    if not text.isdecimal() or int(text) < 1 or (most is not None and int(text) > most):
        raise _bad(f"{key}: found {text!r}, allowed: a whole number from 1{f' to {most}' if most else ''}", text)
    return int(text)


def _ranks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if text == "all":
        return ()
    parts = text.split("+")
    if not all(part.isdecimal() for part in parts):
        raise _bad(f"ranks: found {text!r}, allowed: all, or numbers as in ranks=0,1", text)
    return tuple(sorted({int(part) for part in parts}))


def _bad(message: str, found: str) -> InputError:
    return InputError(f"{FIELD}: {message}", hint=_EXAMPLE, field=FIELD, found=found)
