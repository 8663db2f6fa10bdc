"""The live page in a real browser: it changes as the run does, without being loaded again, and says when it cannot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from browser_session import Session, session
from watched_runs import begin, say, train

from gradus.diagnosis.live.followed import Folder
from gradus.diagnosis.live.pages import Pages
from gradus.diagnosis.live.server import LiveServer
from gradus.record.directory import RunDirectory

TOKEN = "a-token-of-a-test"
pytestmark = browser.needed


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "runs", "gpt", "r1")
    train(run, begin(run), 1, 30)
    (run.attempt_path(1) / "recipe.yaml").write_text("name: gpt\nbatch: 32\n")
    return run


def served(run: RunDirectory) -> LiveServer:
    server = LiveServer(Pages(Folder(run.path.parents[1]), TOKEN), TOKEN, "127.0.0.1", 0, pytest.fail)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@pytest.fixture
def server(run: RunDirectory) -> Iterator[LiveServer]:
    server = served(run)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with session(tmp_path_factory.mktemp("browser")) as page:
        yield page


def address(server: LiveServer, path: str = "/") -> str:
    return f"http://127.0.0.1:{server.port}{path}?token={TOKEN}"


def test_a_page_of_a_run_changes_as_the_run_does(page, server, run):
    page.console.clear()
    page.open(address(server, "/runs/gpt/r1"))
    page.evaluate("window.loadedOnce = true")
    assert "gpt/r1" in page.evaluate("document.querySelector('h1').textContent")
    before = page.evaluate("document.querySelector('#training path.line').getAttribute('d')")
    page.evaluate("document.querySelector('#reproduce details').open = true")
    page.evaluate("document.getElementById('events').scrollIntoView()")
    place = page.evaluate("document.getElementById('events').getBoundingClientRect().top")
    train(run, 1, 31, 60)
    say(run, "running", 60)
    page.until(f"document.querySelector('#training path.line').getAttribute('d') !== {before!r}")
    page.until("document.getElementById('head').textContent.includes('60')")
    assert abs(page.evaluate("document.getElementById('events').getBoundingClientRect().top") - place) < 2
    assert page.evaluate("document.querySelector('#reproduce details').open")
    say(run, "finished", 60)
    page.until("document.getElementById('head').textContent.includes('finished')")
    assert page.evaluate("window.loadedOnce")
    assert page.evaluate("document.getElementById('live').textContent") == "live"
    assert page.console == []


def test_the_list_of_runs_changes_too_and_leads_to_each(page, server, run):
    page.console.clear()
    page.open(address(server))
    page.evaluate("window.loadedOnce = true")
    assert page.evaluate("document.querySelectorAll('#runs tbody tr').length") == 1
    begin(RunDirectory.create(run.path.parents[1], "later", "r2"))
    page.until("document.querySelectorAll('#runs tbody tr').length === 2")
    page.until("document.getElementById('head').textContent.includes('2 running')")
    assert page.evaluate("window.loadedOnce")
    page.evaluate("[...document.querySelectorAll('#runs a')].find(a => a.textContent === 'gpt/r1').click()")
    page.until("document.querySelector('#training path.line') !== null")
    assert page.console == []


def test_it_fits_on_a_phone(page, server):
    page.resize(375)
    try:
        for path in ("/", "/runs/gpt/r1"):
            page.open(address(server, path))
            assert page.evaluate("document.documentElement.scrollWidth") <= 375, path
    finally:
        page.resize(1280)


def test_without_the_token_there_is_no_page(page, server):
    page.open(address(server).partition("?")[0])
    text = page.evaluate("document.body.textContent")
    assert "the token is missing or wrong" in text
    assert "gpt" not in text


def test_a_lost_connection_is_shown_and_what_was_there_stays(page, run):
    server = served(run)
    page.open(address(server, "/runs/gpt/r1"))
    server.shutdown()
    server.server_close()
    # Connections that are open already are still answered; the page must find no new one.
    server.token = "another"
    page.until("document.getElementById('live').dataset.state === 'lost'")
    assert "connection lost" in page.evaluate("document.getElementById('live').textContent")
    assert "gpt/r1" in page.evaluate("document.querySelector('h1').textContent")
