"""A real browser without a window: what a page looks like after its scripts have run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Opened:
    """A page in a window of some size: its document after its scripts have run, and all that they said or failed at."""

    document: str
    console: list[str]


def opened(page: Path, script: str = "", *, width: int = 1280, height: int = 900, dark: bool = False) -> Opened:
    """Like `content`, and the console with it."""
    done = _run(_with_script(page, script), page.parent, _window(width, height, dark), "--dump-dom")
    return Opened(done.stdout, re.findall(r"CONSOLE[^\]]*\] (.*)", done.stderr))


def pictured(
    page: Path, picture: Path, *, width: int = 1280, height: int = 900, dark: bool = False, script: str = ""
) -> None:
    """Write what a window shows, as a PNG."""
    _run(_with_script(page, script), page.parent, _window(width, height, dark), f"--screenshot={picture}")


def printed(page: Path, pdf: Path) -> None:
    """Print it, as a PDF."""
    _run(page, page.parent, [], "--no-pdf-header-footer", f"--print-to-pdf={pdf}")


def _window(width: int, height: int, dark: bool) -> list[str]:
    return [f"--window-size={width},{height}", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]


def _with_script(page: Path, script: str) -> Path:
    tested = page.with_name(f"tested-{page.name}")
    tested.write_text(
        page.read_text().replace("</body>", f"<script>{script}</script></body>") if script else page.read_text()
    )
    return tested


def _run(page: Path, folder: Path, window: list[str], *what: str) -> subprocess.CompletedProcess[str]:
    assert PROGRAM is not None, f"none of {', '.join(NAMES)} is here: make browser"
    safe = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    alone = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'browser'}"]
    done = subprocess.run(
        [PROGRAM, *safe, *alone, *window, *what, page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done
