"""Guard: who may see the live pages. Whoever has the token, and asks this server and not one of another name."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
from functools import cache

_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def new_token() -> str:
    return secrets.token_urlsafe(24)


def is_token(given: str | None, token: str) -> bool:
    """In the same time whatever is wrong with it."""
    return hmac.compare_digest((given or "").encode(errors="replace"), token.encode())


def bearer(header: str | None) -> str | None:
    """The token of an `Authorization` header."""
    scheme, _, given = (header or "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else None


def is_our_host(header: str | None) -> bool:
    """Whether a `Host` header can only mean this machine.

    A page of somebody else can have its own name resolve to 127.0.0.1 and would then read ours as if it were its own.
    It cannot do so with an address, nor with the names of this machine.
    """
    name = (header or "").strip().lower()
    name = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
    if name in _own_names():
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@cache
def _own_names() -> frozenset[str]:
    return frozenset({"localhost", socket.gethostname().lower(), socket.getfqdn().lower()})


def content_security_policy(page: str) -> str:
    """Nothing from anywhere else, and of scripts only those that are in the page as we wrote it."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in _SCRIPT.findall(page)]
    scripts = " ".join(f"'sha256-{one}'" for one in hashes) or "'none'"
    rules = {
        "default-src": "'none'",
        "script-src": scripts,
        "style-src": "'unsafe-inline'",  # charts place and colour their parts by style attributes
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())
