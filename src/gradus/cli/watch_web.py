"""`gradus watch --web`: runs in a browser, and for Prometheus."""

from __future__ import annotations

import getpass
import ipaddress
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from gradus.cli.output import print_json
from gradus.diagnosis.live.followed import Folder
from gradus.diagnosis.live.guard import new_token
from gradus.diagnosis.live.pages import Pages
from gradus.diagnosis.live.prometheus import write_textfile
from gradus.diagnosis.live.server import LiveServer
from gradus.record.directory import RunDirectory
from gradus.record.polling import Polling
from gradus.record.problem import report_on_stderr
from gradus.schema.errors import EXIT_FINISHED, InputError

TEXTFILE = "gradus.prom"
_TEXTFILE_SECONDS = 15.0


@dataclass(frozen=True)
class WebOptions:
    """What was typed after `gradus watch --web`."""

    run: str | None = None
    runs: str = "runs"
    port: int = 0
    bind: str = "127.0.0.1"
    token_file: str | None = None
    textfile: str | None = None
    as_json: bool = False


def watch_web_command(options: WebOptions) -> int:
    """Serve until Ctrl-C. Whatever becomes of it, runs are left alone."""
    root = Path(options.runs)
    only = RunDirectory.open(options.run, root) if options.run is not None else None
    if only is None and not root.is_dir():
        raise InputError(f"--runs: there is no folder {root}", field="--runs", found=str(root), allowed="a folder")
    textfile = _textfile(options.textfile)
    token = _token(options.token_file)
    pages = Pages(Folder(root, only), token)
    server = _server(pages, token, options)
    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=server.serve_forever, name="gradus-web", daemon=True)
    thread.start()
    writing = Polling(_Textfile(textfile, pages).write, _TEXTFILE_SECONDS) if textfile else None
    try:
        _tell(server, token, options)
        ended.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        server.shutdown()
        server.server_close()
        if writing:
            writing.close()
    return EXIT_FINISHED


class _Textfile:
    """Written every few seconds; a disk that is full for a while is told once."""

    def __init__(self, path: Path, pages: Pages) -> None:
        self._path, self._pages = path, pages
        self._failing = False
        self.write()

    def write(self) -> None:
        try:
            write_textfile(self._path, self._pages.metrics())
        except OSError as error:
            if not self._failing:
                report_on_stderr(f"{self._path}: cannot write ({error.strerror})")
            self._failing = True
        else:
            self._failing = False


def _textfile(folder: str | None) -> Path | None:
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise InputError(
            f"--textfile: there is no folder {folder}",
            hint="the folder that node-exporter is given as --collector.textfile.directory",
            field="--textfile",
            found=folder,
            allowed="a folder",
        )
    return Path(folder) / TEXTFILE


def _token(file: str | None) -> str:
    """A new one, or that of a file: Prometheus must know it also after a restart."""
    if file is None:
        return new_token()
    try:
        token = Path(file).read_text().strip()
    except OSError as error:
        raise InputError(
            f"--token-file: cannot read {file}: {error.strerror}", field="--token-file", found=file
        ) from error
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(
            f"--token-file: {file} has no token: allowed are 16 or more letters, digits and signs, without spaces",
            hint=f"(umask 077; openssl rand -hex 24 > {file})",
            field="--token-file",
            found=f"{len(token)} characters",
        )
    return token


def _server(pages: Pages, token: str, options: WebOptions) -> LiveServer:
    try:
        return LiveServer(pages, token, options.bind, options.port)
    except (OSError, UnicodeError) as error:
        where = f"{options.bind}:{options.port}"
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"--bind, --port: cannot serve on {where}: {reason}",
            hint="leave out --port, and a free one is taken",
            field="--port",
            found=where,
        ) from error


def _tell(server: LiveServer, token: str, options: WebOptions) -> None:
    """Where to look. The address goes to stdout and to nowhere else: who has it sees everything."""
    here = _is_local(options.bind)
    host = options.bind if here else socket.gethostname()
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.port}/?token={token}"
    if options.as_json:
        print_json({"url": url, "port": server.port, "token": token, "metrics": url.replace("/?", "/metrics?")})
    else:
        print(url, flush=True)
    sys.stdout.flush()
    if not here:
        print(
            f"warning: served on {options.bind}, without encryption: whoever can listen on the network sees the token",
            file=sys.stderr,
        )
    elif os.environ.get("SSH_CONNECTION"):
        forward = f"ssh -L {server.port}:{options.bind}:{server.port} {getpass.getuser()}@{socket.getfqdn()}"
        print(f"from your own machine: {forward}", file=sys.stderr)
    print("Ctrl-C ends it; runs go on", file=sys.stderr, flush=True)


def _is_local(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"
