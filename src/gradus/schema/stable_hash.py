"""A hash that means the same everywhere, for all that is random here and must not depend on where it is drawn."""

from __future__ import annotations

import hashlib


def stable_hash(*parts: int | str) -> int:
    """64 bits that depend on `parts` only: the same in every process, on every machine, in every version."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        # The kind and the length keep ("ab", "c") and ("a", "bc"), or 1 and "1", apart.
        kind, text = ("s", part) if isinstance(part, str) else ("i", str(int(part)))
        data = text.encode()
        digest.update(f"{kind}{len(data)}:".encode() + data)
    return int.from_bytes(digest.digest(), "little")
