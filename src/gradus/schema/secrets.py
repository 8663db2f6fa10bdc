"""Secrets are known by their names: what has such a name stays out of files."""

from __future__ import annotations

import re

_WORDS = ("token", "password", "passwd", "passphrase", "secret", "secrets", "key", "credential", "credentials")


def names_a_secret(name: str) -> bool:
    """By the ends of words: `api_key`, `apikey` and `HF_TOKEN` are secrets, the recipe's `tokens` is not.

    >>> names_a_secret("WANDB_API_KEY"), names_a_secret("tokens")
    (True, False)
    """
    return any(word.endswith(_WORDS) for word in re.split(r"[^a-z]+", name.lower()) if word)
