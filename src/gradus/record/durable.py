"""Durable: what was written is on the disk, and not only in the system's memory."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Put a file's content, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
