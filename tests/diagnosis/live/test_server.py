"""The live server: for who has the token and for nobody else; read-only, and never beyond the runs of its folder."""

from __future__ import annotations

import gzip
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watched_runs import begin, say, train

from gradus.diagnosis.live import followed
from gradus.diagnosis.live.followed import Folder
from gradus.diagnosis.live.guard import bearer, content_security_policy, is_our_host, is_token
from gradus.diagnosis.live.pages import Pages
from gradus.diagnosis.live.server import LiveServer
from gradus.diagnosis.report.run_report import RunReport
from gradus.record.append_log import AppendLog
from gradus.record.directory import RunDirectory

TOKEN = "a-token-of-a-test"


class Client:
    def __init__(self, port: int) -> None:
        self._port = port

    def __call__(
        self, path: str, *, method: str = "GET", token: str | None = TOKEN, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        given = {"Authorization": f"Bearer {token}"} if token is not None else {}
        connection.request(method, path, headers={**given, **{k.replace("_", "-"): v for k, v in headers.items()}})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, answer.headers, body

    def json(self, path: str) -> Any:
        status, _, body = self(path)
        assert status == 200, body
        return json.loads(body)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("first", "second"):
        run = RunDirectory.create(tmp_path / "runs", name, "r1")
        train(run, begin(run), 1, 30)
    (tmp_path / "secret").write_text("not for you")
    return tmp_path / "runs"


@pytest.fixture
def problems() -> list[str]:
    return []


@pytest.fixture
def server(runs: Path, problems: list[str]) -> Iterator[LiveServer]:
    folder = Folder(runs, on_problem=problems.append)
    server = LiveServer(Pages(folder, TOKEN), TOKEN, "127.0.0.1", 0, problems.append)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def get(server: LiveServer) -> Client:
    return Client(server.port)


@pytest.mark.parametrize("path", ["/", "/metrics", "/updates", "/api/runs", "/runs/first/r1", "/nothing"])
@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], "ä"])
def test_without_the_token_there_is_nothing(get, path, token):
    status, _, body = get(path if token is None else f"{path}?token={'%C3%A4' if token == 'ä' else token}", token=None)
    assert status == 403
    assert b"first" not in body
    if token and token.isascii():
        assert get(path, token=token)[0] == 403


def test_the_token_is_taken_from_the_address_or_from_a_header(get):
    assert get(f"/?token={TOKEN}", token=None)[0] == 200
    assert get(f"/metrics?token={TOKEN}", token=None)[0] == 200
    assert get("/metrics")[0] == 200
    assert bearer("bearer  x ") == "x"
    assert bearer("Basic x") is None
    assert not is_token(None, TOKEN)


@pytest.mark.parametrize(
    "path",
    [
        "/../secret",
        "/runs/../secret",
        "/runs/../../secret",
        "/runs/first/../../secret",
        "/runs/%2e%2e/secret",
        "/runs/..%2f..%2fsecret/r1",
        "/runs/first/..%2f..%2f..%2fsecret",
        "/runs/first/r1/status.json",
        "/runs/first/r1/../../../secret",
        "//secret",
        "/runs/first%00/r1",
        "/runs/./first/r1",
    ],
)
def test_no_address_leads_out_of_the_list_of_runs(get, path):
    status, _, body = get(path)
    assert status == 404
    assert b"not for you" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT"])
def test_there_is_nothing_to_change(get, method):
    assert get("/", method=method)[0] == 405


def test_a_name_of_another_machine_is_refused(get):
    """Else a page of somebody else could have its name point here, and read ours."""
    assert get("/", Host="evil.example:80")[0] == 403
    assert get("/", Host="")[0] == 403
    for host in ("localhost:8000", "127.0.0.1", "[::1]:9000", "10.0.0.7:80", "LOCALHOST"):
        assert get("/api/runs", Host=host)[0] == 200, host
    assert not is_our_host("127.0.0.1.evil.example")
    assert not is_our_host(None)


def test_a_page_may_load_nothing_and_run_only_its_own_scripts(get):
    _, headers, body = get("/")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    assert policy.count("'sha256-") == body.count(b"<script>") == 2
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Frame-Options"] == "DENY"
    assert b"http-equiv" not in body
    assert "script-src 'none'" in content_security_policy("")


def test_the_list_has_all_runs_with_what_they_are_at(get):
    _, _, body = get("/")
    for text in (b"first/r1", b"second/r1", b"30/100", b"2 k tok/s", b"running"):
        assert text in body
    documents = get.json("/api/runs")
    assert {(one["name"], one["state"], one["step"]) for one in documents} == {
        ("first", "running", 30),
        ("second", "running", 30),
    }
    assert documents[0]["findings"] == []


def test_links_of_the_list_lead_to_the_runs(get):
    import re

    _, _, body = get("/")
    links = re.findall(r'href="(/runs/[^"]*)"', body.decode())
    assert len(links) == 2
    for link in links:
        assert get(link, token=None)[0] == 200


def test_only_what_is_new_is_sent(get, runs, monkeypatch):
    monkeypatch.setattr("gradus.diagnosis.live.changing._LEAST_SECONDS", 0.0)
    monkeypatch.setattr("gradus.diagnosis.live.changing._PATIENCE", 0.0)
    first = get.json("/runs/first/r1/updates?since=0")
    assert set(first["sections"]) == set(first["order"])
    again = get.json(f"/runs/first/r1/updates?since={first['version']}")
    assert (again["version"], again["sections"]) == (first["version"], {})
    run = RunDirectory(runs / "first" / "r1")
    AppendLog(run.metrics_path).write({"step": 31, "attempt": 1, "loss": 1.25, "step_seconds": 0.5})
    say(run, "running", 31)
    news = get.json(f"/runs/first/r1/updates?since={first['version']}")
    assert news["version"] > first["version"]
    assert "head" in news["sections"]
    assert 0 < len(news["sections"]) < len(news["order"])
    assert get.json(f"/runs/first/r1/updates?since={news['version']}")["sections"] == {}


@pytest.mark.parametrize("since", ["", "-1", "x", "999999", "1e9", "9" * 5000])
def test_a_version_that_never_was_gets_everything(get, since):
    news = get.json(f"/runs/first/r1/updates?since={since}")
    assert set(news["sections"]) == set(news["order"])


def test_a_single_run_is_at_the_root_and_others_are_not_there(runs):
    only = RunDirectory(runs / "first" / "r1")
    server = LiveServer(Pages(Folder(runs, only), TOKEN), TOKEN, "127.0.0.1")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        get = Client(server.port)
        assert b"first/r1" in get("/")[2]
        assert get("/runs/second/r1")[0] == 404
        assert b'name="second"' not in get("/metrics")[2]
    finally:
        server.shutdown()
        server.server_close()


def test_runs_that_begin_later_are_found(get, runs, monkeypatch):
    monkeypatch.setattr("gradus.diagnosis.live.followed._LIST_SECONDS", 0.0)
    assert get("/runs/third/r1")[0] == 404
    begin(RunDirectory.create(runs, "third", "r1"))
    assert get("/runs/third/r1")[0] == 200


def test_a_run_that_cannot_be_drawn_is_told_and_the_others_are_still_there(get, problems, monkeypatch):
    drawn = RunReport.parts

    def fails_for_the_first(report: RunReport) -> Any:
        if report.run.name == "first":
            raise ZeroDivisionError
        return drawn(report)

    monkeypatch.setattr(RunReport, "parts", fails_for_the_first)
    status, _, _ = get(f"/runs/first/r1?token={TOKEN}")
    assert status == 500
    assert any("/runs/first/r1: cannot be shown" in problem for problem in problems)
    assert not any(TOKEN in problem for problem in problems)
    assert get("/runs/second/r1")[0] == 200


def test_nothing_is_logged(get, capfd):
    get(f"/?token={TOKEN}", token=None)
    get("/?token=wrong", token=None)
    said = capfd.readouterr()
    assert said.out == said.err == ""


def test_long_answers_are_packed_for_who_can_unpack(get):
    _, headers, body = get("/", Accept_Encoding="gzip")
    assert headers["Content-Encoding"] == "gzip"
    assert b"first/r1" in gzip.decompress(body)
    assert len(body) < len(get("/")[2]) / 2


def test_a_reader_that_asks_with_head_gets_no_body(get):
    status, headers, body = get("/", method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000


def test_what_a_run_is_called_is_text_and_no_markup(get, runs):
    run = RunDirectory(runs / "first" / "r1")
    say(run, "failed", 30, last_error="<script>alert(1)</script>")
    _, _, body = get("/")
    assert b"<script>alert(1)" not in body
    assert b"&lt;script&gt;alert(1)" in body


def test_a_run_that_has_written_much_is_judged_in_the_background(runs, monkeypatch):
    monkeypatch.setattr("gradus.diagnosis.live.followed._QUICK_BYTES", 0)
    monkeypatch.setattr("gradus.diagnosis.live.followed._LOOK_SECONDS", 0.0)
    may_judge = threading.Event()
    judged = followed.explain

    def late(evidence: Any) -> Any:
        may_judge.wait(60)
        return judged(evidence)

    monkeypatch.setattr(followed, "explain", late)
    one = followed.Followed(RunDirectory(runs / "first" / "r1"), pytest.fail)
    assert one.snapshot().findings is None
    may_judge.set()
    while one.snapshot().findings is None:
        threading.Event().wait(0.01)


def test_a_run_that_cannot_be_judged_is_still_shown(runs, monkeypatch):
    def fails(evidence: Any) -> Any:
        raise ZeroDivisionError("a rule is wrong")

    monkeypatch.setattr(followed, "explain", fails)
    problems: list[str] = []
    snapshot = followed.Followed(RunDirectory(runs / "first" / "r1"), problems.append).snapshot()
    assert (snapshot.view.step, snapshot.findings) == (30, None)
    assert "not judged: ZeroDivisionError: a rule is wrong" in problems[0]
