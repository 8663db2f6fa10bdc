"""Debian's Prometheus, started on a free port with a folder of its own; and promtool, which judges what it reads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

PROGRAM, TOOL = shutil.which("prometheus"), shutil.which("promtool")
# `make test` installs it where it may: as root. There, a missing one is a failure.
needed = pytest.mark.skipif(
    (PROGRAM is None or TOOL is None) and os.geteuid() != 0, reason="no prometheus here, and only root may install it"
)
PATIENCE_SECONDS = 120.0  # this only ends a test that hangs


def promtool(*arguments: object, given: str = "") -> str:
    """What promtool says; it must be content."""
    assert TOOL is not None, "promtool is not here: make prometheus"
    done = subprocess.run([TOOL, *map(str, arguments)], input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Prometheus:
    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"

    def get(self, path: str, **asked: str) -> Any:
        address = f"{self._address}/api/v1/{path}?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        return list(self.get("query", query=expression)["result"])

    def until(self, found: Any) -> Any:
        """Ask until there is an answer."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                if answer := found(self):
                    return answer
            except OSError:
                pass  # it is still starting
            assert time.monotonic() < until, "Prometheus has not come to that"
            time.sleep(0.3)


@contextmanager
def scraping(folder: Path, target: str, token_file: Path, rules: Path) -> Iterator[Prometheus]:
    """A Prometheus that asks `target` every second, with the token of a file."""
    assert PROGRAM is not None, "prometheus is not here: make prometheus"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {
        "job_name": "gradus",
        "static_configs": [{"targets": [target]}],
        "authorization": {"credentials_file": str(token_file)},
    }
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [job],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield Prometheus(port)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
