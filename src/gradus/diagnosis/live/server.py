"""The live server: pages, their updates and metrics over HTTP. It only reads, and only for who has the token."""

from __future__ import annotations

import gzip
import socket
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from gradus.diagnosis.live.guard import bearer, content_security_policy, is_our_host, is_token
from gradus.diagnosis.live.pages import Pages
from gradus.diagnosis.live.prometheus import CONTENT_TYPE
from gradus.record import strict_json
from gradus.record.problem import OnProblem, report_on_stderr

_SILENT_SECONDS = 30.0  # a connection on which nothing comes is closed
_WORTH_PACKING = 1024  # bytes
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the token is in the address
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
HTML, JSON, TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"


class LiveServer(ThreadingHTTPServer):
    """Serves until `shutdown`. Requests that are still being answered then do not hold it up."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(
        self, pages: Pages, token: str, bind: str, port: int = 0, on_problem: OnProblem = report_on_stderr
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self.pages = pages
        self.token = token
        self.on_problem = on_problem
        super().__init__((bind, port), _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away in the middle of an answer is nothing to report."""


class _Answer(Exception):
    """Ends a request: what to say, other than a page."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version = "gradus"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = _SILENT_SECONDS

    def do_GET(self) -> None:
        # What comes with a request is not read, and so must not be taken for the next one.
        self.close_connection |= bool(self.headers.get("Content-Length") or self.headers.get("Transfer-Encoding"))
        try:
            kind, text = self._answered()
            self._send(HTTPStatus.OK, kind, text)
        except _Answer as answer:
            self._send(answer.status, TEXT, f"{answer.text}\n")
        except ConnectionError:
            raise  # the reader is gone
        except Exception as error:  # one page that cannot be drawn must not end the server
            path = urlsplit(self.path).path  # without what comes after it: the token
            self.server.on_problem(f"{path}: cannot be shown: {type(error).__name__}: {error}")
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, f"cannot be shown: {type(error).__name__}: {error}\n")

    do_HEAD = do_GET

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # the base class answers 501 to what it finds no method for
            return self._refuse
        raise AttributeError(name)

    def _refuse(self) -> None:
        self.close_connection = True  # what it sent along is not read
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, TEXT, "only GET and HEAD: there is nothing to change here\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: addresses have the token in them."""

    def _answered(self) -> tuple[str, str]:
        if not is_our_host(self.headers.get("Host")):
            raise _Answer(HTTPStatus.FORBIDDEN, "not a name of this machine; use its address, or localhost")
        address = urlsplit(self.path)
        asked = parse_qs(address.query)
        given = bearer(self.headers.get("Authorization")) or asked.get("token", [""])[0]
        if not is_token(given, self.server.token):
            raise _Answer(
                HTTPStatus.FORBIDDEN, "the token is missing or wrong; the whole address is where gradus watch runs"
            )
        return self._page([unquote(part) for part in address.path.strip("/").split("/")], asked)

    def _page(self, parts: list[str], asked: dict[str, list[str]]) -> tuple[str, str]:
        pages = self.server.pages
        alone = pages.folder.only
        match parts:
            case ["metrics"]:
                return CONTENT_TYPE, pages.metrics()
            case ["api", "runs"]:
                return JSON, strict_json.pretty(pages.documents())
            case [""]:
                return HTML, pages.page(alone)
            case ["updates"]:
                return JSON, strict_json.encode(pages.updates(alone, _since(asked)))
            case ["runs", name, run_id] | ["runs", name, run_id, "updates"]:
                run = pages.folder.find(name, run_id)
                if run is None:
                    raise _Answer(HTTPStatus.NOT_FOUND, "no such run")
                if parts[-1] == "updates" and len(parts) == 4:
                    return JSON, strict_json.encode(pages.updates(run, _since(asked)))
                return HTML, pages.page(run)
        raise _Answer(HTTPStatus.NOT_FOUND, "nothing here")

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        packed = len(body) > _WORTH_PACKING and "gzip" in self.headers.get("Accept-Encoding", "")
        if packed:
            body = gzip.compress(body, 5, mtime=0)
        self.send_response(status)
        headers = {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body)), "Vary": "Accept-Encoding"}
        if packed:
            headers["Content-Encoding"] = "gzip"
        headers["Content-Security-Policy"] = content_security_policy(text if kind == HTML else "")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _since(asked: dict[str, list[str]]) -> int:
    text = asked.get("since", ["0"])[0]
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
