"""A real browser that stays open: a page is watched while it changes. DevTools' protocol over pipes is how."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from browser import NAMES, PROGRAM

PATIENCE_SECONDS = 120.0  # this only ends a test that hangs


class Refused(AssertionError):
    """The browser cannot do that; what is asked while a page goes on to another one has nobody to answer it."""


class Session:
    """One page of one browser."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.console: list[str] = []
        """What the page said or failed at."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address: str) -> None:
        failed = self._call("Page.navigate", url=address).get("errorText")
        assert not failed, failed
        self.until("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """What an expression is in the page now."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Ask until the expression is true."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not (value := self._value_now(script)):
            assert time.monotonic() < until, f"never true: {script}"
            time.sleep(0.1)
        return value

    def _value_now(self, script: str) -> Any:
        try:
            return self.evaluate(script)
        except Refused:
            return None

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise Refused(method, answer["error"])
                return dict(answer["result"])
            self._note(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._reading, 2**20)
            assert data, "the browser is gone"
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled":
                self.console.append(" ".join(str(one.get("value", one)) for one in told["args"]))
            case "Runtime.exceptionThrown":
                self.console.append(str(told["exceptionDetails"]))
            case "Log.entryAdded":
                self.console.append(f"{told['entry']['level']}: {told['entry']['text']}")


@contextmanager
def session(folder: Path) -> Iterator[Session]:
    assert PROGRAM is not None, f"none of {', '.join(NAMES)} is here: make browser"
    to_browser, ours_out = os.pipe()
    ours_in, from_browser = os.pipe()
    options = [
        "--headless",
        "--no-sandbox",  # the tests may run as root, which the sandbox refuses
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={folder / 'browser'}",
        "--remote-debugging-pipe",  # it reads from 3 and writes to 4
    ]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}', PROGRAM, *options],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Session(ours_in, ours_out)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(ours_in)
        os.close(ours_out)
