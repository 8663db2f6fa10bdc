"""Training scripts as people write them run unmodified on two ranks, and do what they do under torchrun."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from gradus_command import Done, Gradus, events, status, wait_until

SCRIPTS = Path(__file__).parent
# Threads of torch abort a process that has come to its end now and then, under bare torchrun as well.
ABORT_AT_EXIT = "terminate called without an active exception"


def run_script(gradus: Gradus, script: str, *arguments: str) -> str:
    """What both ranks printed, with the rank before each line; the script must have finished."""
    for _ in range(5):
        shutil.rmtree(gradus.folder / "out", ignore_errors=True)
        done = gradus("train", "--nproc", "2", "--json", "--", str(SCRIPTS / script), *arguments, timeout=240)
        if ABORT_AT_EXIT not in done.out:
            break
    return log_of(done)


def log_of(done: Done, state: str = "finished", code: int = 0) -> str:
    assert (done.code, done.json["state"]) == (code, state), done.err + done.out
    run = Path(done.json["run"])
    assert status(run)["state"] == state
    assert "problems" not in done.json  # such as ranks that never met
    (log,) = (run / "attempts" / str(status(run)["attempt"]) / "logs").iterdir()
    return log.read_text()


def numbers(log: str, pattern: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, log)]


def test_plain_ddp_with_a_distributed_sampler(gradus):
    log = run_script(gradus, "plain_ddp.py", "3", "out")
    for rank in (0, 1):  # 256 samples in batches of 16 on each of two ranks
        losses = numbers(log, rf"\[rank{rank}\]: \[GPU{rank}\] Epoch \d \| Steps: 8 \| Loss: (\S+)")
        assert len(losses) == 3
        assert losses[-1] < losses[0] / 20
    snapshot = torch.load(gradus.folder / "out" / "snapshot.pt")
    assert snapshot["EPOCHS_RUN"] == 3
    assert snapshot["MODEL_STATE"]["weight"].shape == (1, 20)


@pytest.mark.slow
def test_a_script_that_saves_on_sigterm_is_stopped_and_goes_on(gradus):
    path = str(SCRIPTS / "sigterm_saver.py")
    script = (path, "--output-dir", "out", "--steps", "3000", "--step-time", "0.02")
    process = gradus.start("train", "--nproc", "2", "--run-id", "stopped", "--json", "--", *script)
    run = gradus.run("stopped", "sigterm_saver")
    wait_until(lambda: list((run / "attempts/1/logs").glob("*.log")) and "step 10/3000" in live_log(run), process)
    assert gradus("runs", "--json").json[0]["state"] == "running"
    process.send_signal(signal.SIGTERM)
    done = gradus.end(process)
    assert (done.code, done.json["state"], done.json["reason"]) == (75, "stopped", "SIGTERM"), done.err
    saved = torch.load(gradus.folder / "out" / "last.pt")
    assert 10 <= saved["step"] < 3000
    assert (saved["world"], saved["rank_sum"]) == (2, 1.0)
    assert [event["event"] for event in events(run)] == ["launch", "stop-request", "end"]

    more = str(saved["step"] + 20)
    script = (path, "--output-dir", "out", "--steps", more)
    done = gradus("train", "--nproc", "2", "--resume", "stopped", "--json", "--", *script)
    if ABORT_AT_EXIT not in done.out:
        assert f"resumed at step {saved['step']}" in log_of(done)
    assert torch.load(gradus.folder / "out" / "last.pt")["step"] == int(more)
    assert status(run)["attempt"] == 2


def live_log(run: Path) -> str:
    return "".join(path.read_text() for path in (run / "attempts/1/logs").glob("*.log"))


@pytest.mark.slow
def test_a_gpt_in_one_file(gradus):
    log = run_script(gradus, "nano_gpt.py", "--out_dir=out", "--max_iters=30")
    assert "[rank0]: tokens per iteration will be: 512" in log  # 4 × 4 × 32: shared out over the ranks
    losses = numbers(log, r"\[rank0\]: step \d+: train loss \S+ val loss (\S+)")
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 1
    assert torch.load(gradus.folder / "out" / "ckpt.pt")["iter_num"] == 30


@pytest.mark.slow
def test_accelerate(gradus):
    log = run_script(gradus, "with_accelerate.py", "--output_dir", "out", "--cpu")
    for rank in (0, 1):  # 24 batches in all
        assert f"[rank{rank}]: process {rank} of 2 saw 12 batches" in log
    accuracies = numbers(log, r"\[rank0\]: epoch \d: accuracy (\S+) of 128")
    assert len(accuracies) == 6
    assert accuracies[-1] > 0.85
    saved = {path.name for path in (gradus.folder / "out").iterdir()}
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"} <= saved


@pytest.mark.slow
def test_the_hugging_face_trainer(gradus):
    options = (
        "--output_dir out --max_steps 20 --per_device_train_batch_size 4 --learning_rate 5e-3 --logging_steps 5 "
        "--report_to none --use_cpu true --ddp_backend gloo"
    )
    log = run_script(gradus, "with_hf_trainer.py", *options.split())
    for rank in (0, 1):
        assert f"[rank{rank}]: rank {rank}/2 done at step 20" in log
    history = json.loads((gradus.folder / "out" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5
    assert (gradus.folder / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_lightning(gradus):
    log = run_script(gradus, "with_lightning.py", "--max_epochs", "4", "--out", "out")
    for rank in (0, 1):
        losses = numbers(log, rf"\[rank{rank}\]: rank {rank}/2 epoch \d train_loss (\S+)")
        assert len(losses) == 4
        assert losses[-1] < losses[0] / 20
    assert [path.name for path in (gradus.folder / "out").iterdir()] == ["last-epoch=3.ckpt"]
