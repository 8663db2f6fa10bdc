"""A real browser without a window: what a page looks like after its scripts have run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)
# `make test` installs one where it may: as root. There, a missing one is a failure.
needed = pytest.mark.skipif(
    PROGRAM is None and os.geteuid() != 0, reason="no chromium here, and only root may install it"
)


def content(page: Path, script: str = "") -> str:
    """The document of a page that was opened from a file, as it is after a script of the test has run in it.

    The browser reaches no network: whatever a page asks for beyond itself is missing.
    """
    assert PROGRAM is not None, f"none of {', '.join(NAMES)} is here: make browser"
    tested = page.with_name(f"tested-{page.name}")
    tested.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    done = subprocess.run(
        [
            PROGRAM,
            "--headless",
            "--no-sandbox",  # the tests may run as root, which the sandbox refuses
            "--disable-gpu",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={page.parent / 'browser'}",
            "--dump-dom",
            tested.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
