"""A run that trains, watched by the real Prometheus and a real browser, and exported while it goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import browser
import pytest
import real_prometheus
from browser_session import session
from gradus_command import Gradus

TOKEN = "0123456789abcdef0123"


@pytest.fixture
def gradus(tmp_path: Path) -> Iterator[Gradus]:
    command = Gradus(tmp_path)
    yield command
    command.stop_all()


@pytest.mark.slow
@browser.needed
@real_prometheus.needed
def test_prometheus_and_a_browser_follow_a_run_from_its_start_to_its_failure(gradus, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "runs").mkdir()
    (tmp_path / "prometheus").mkdir()
    rules = tmp_path / "alerts.yaml"
    rules.write_text(resources.files("gradus.diagnosis.live").joinpath("alerts.yaml").read_text())
    web = gradus.start("watch", "--web", "--token-file", "token")
    address = web.stdout.readline().strip()
    target = address.removeprefix("http://").partition("/")[0]
    with (
        real_prometheus.scraping(tmp_path / "prometheus", target, tmp_path / "token", rules) as prometheus,
        session(tmp_path) as page,
    ):
        prometheus.until(lambda p: p.query('up{job="gradus"} == 1'))
        page.open(address)
        assert page.evaluate("document.querySelectorAll('#runs tbody tr').length") == 0
        recipe = gradus.recipe(steps=40_000, exporters=["mlflow"], checkpoint={"every": 5})
        train = gradus.start("train", recipe, "--nproc", "2", "--run-id", "r1", STEP_SECONDS="0.1")
        page.until("document.querySelectorAll('#runs tbody tr').length === 1")
        page.until("document.querySelector('#runs').textContent.includes('running')")
        [state] = prometheus.until(lambda p: p.query('gradus_run_state{state="running"} == 1'))
        assert (state["metric"]["run"], state["metric"]["name"]) == ("r1", "own")
        # A number that changes from one scrape to the next.
        [step] = prometheus.until(lambda p: p.query("gradus_run_step > 5"))
        prometheus.until(lambda p: p.query(f"gradus_run_step > {step['value'][1]}"))
        [seconds] = prometheus.until(lambda p: p.query("sum(gradus_run_step_seconds)"))
        assert float(seconds["value"][1]) > 0.09
        prometheus.until(lambda p: len(p.query("gradus_run_rank_own_seconds")) == 2)
        prometheus.until(lambda p: p.query("gradus_host_cpu_utilisation_ratio"))
        page.evaluate("document.querySelector('#runs a').click()")
        page.until("document.querySelector('#training path.line') !== null")
        before = page.evaluate("document.querySelector('#training path.line').getAttribute('d')")
        page.until(f"document.querySelector('#training path.line').getAttribute('d') !== {before!r}")
        train.send_signal(signal.SIGKILL)
        gradus("runs", "stop", "r1", "--now")
        prometheus.until(lambda p: p.query('gradus_run_state{state="running"} == 0'))
        page.until("!document.getElementById('head').textContent.includes('running')")
        groups = prometheus.get("rules")["groups"]
        assert [rule["health"] for group in groups for rule in group["rules"]] == ["ok"] * 9
        prometheus.until(
            lambda p: any(
                alert["labels"]["alertname"] in ("GradusRunFailed", "GradusRunLost")
                for alert in p.get("alerts")["alerts"]
            )
        )
        assert page.console == []
    web.send_signal(signal.SIGINT)
    assert gradus.end(web).code == 0


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_is_stopped_and_goes_on_is_one_run_in_mlflow(gradus, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    recipe = gradus.recipe(steps=6, exporters=["mlflow"])
    assert gradus("train", recipe, "--run-id", "r1", MLFLOW_TRACKING_URI="").code == 0
    again = gradus("train", "--resume", "r1", "--set", "steps=9", MLFLOW_TRACKING_URI="")
    assert again.code == 0, again.err
    client = MlflowClient(tracking_uri=(tmp_path / "runs" / "mlruns").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("own").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["recipe.batch"] == "8"
    steps = [one.step for one in client.get_metric_history(run.info.run_id, "train/loss")]
    assert steps == list(range(1, 10))
