"""What only a GPU can show: no step waits for the device, every precision trains, and a resumed run is the same run.

python benchmarks/gpu_checks.py     # needs a CUDA GPU; prints one line for each claim, fails on the first false one
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from gradus.hardware.cluster import detect_cluster
from gradus.parallel.world import alone
from gradus.planner.defaults import default_plan
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.record.stop import request_stop
from gradus.schema.recipe import Recipe
from gradus.training.joining import Place
from gradus.training.live_run import LiveRun
from gradus.training.loop import train
from gradus.training.own_loop import Run

DEVICE = torch.device("cuda", 0)
GPT = {"model": {"use": "gpt", "layers": 4, "width": 256, "heads": 4, "context": 256, "dropout": 0.1}}
TEXT = {"data": {"use": "stdlib-text"}}
ADAMW = {"optimizer": {"use": "adamw", "lr": 1e-3, "warmup": 10, "decay": "cosine", "clip": 1.0}}
CNN = {
    "model": {"use": "simple-cnn"},
    "data": {"use": "synthetic-images", "size": 32, "samples": 2000},
    "optimizer": {"use": "sgd", "lr": 0.02, "momentum": 0.9},
}


def live_run(folder: Path, attempt: int = 1, run: RunDirectory | None = None, **document: Any) -> LiveRun:
    recipe = resolved(Recipe.from_document({"name": "check", "batch": 32, "steps": 30, "seed": 1, **document}))
    plan = default_plan(recipe, detect_cluster(), 1).plan
    return LiveRun.from_recipe(recipe, plan, run or RunDirectory.create(folder, "check"), attempt, alone(DEVICE))


def finished(live: LiveRun) -> list[dict[str, Any]]:
    ending = train(live)
    live.recorder.close(state=ending.state)
    return read_metrics(live.run)


def check_no_step_waits(folder: Path, name: str, **document: Any) -> None:
    """CUDA's own detector of implicit synchronisation raises if any operation of a step makes the host wait."""
    live = live_run(folder, **document)
    batches = live.loader.micro_batches(0, 20)
    for step in range(20):
        torch.cuda.set_sync_debug_mode("error" if step >= 5 else "default")  # the first steps compile
        live.step.run(batches, step, 1e-3, measure_norm=True)
    torch.cuda.set_sync_debug_mode("default")
    live.recorder.close(state="finished")
    print(f"no step waits for the device: {name} ({live.plan.precision}, compile {live.plan.compile})", flush=True)


def check_precision(folder: Path, precision: str, compile: bool) -> None:
    rows = finished(live_run(folder, **GPT, **TEXT, **ADAMW, plan={"precision": precision, "compile": compile}))
    first, last = rows[0]["loss"], rows[-1]["loss"]
    assert last < first - 0.5, (first, last)
    speed = rows[-2]["tokens_per_second"]
    figures = f"loss {first:.3f} -> {last:.3f}, {speed:,.0f} tokens/s, MFU {rows[-2]['mfu']}"
    print(f"{precision}, compile {compile}: {figures}", flush=True)


def check_resume(folder: Path, optimizer: str, precision: str) -> None:
    plan = {"compile": False, "precision": precision}
    changes = {**GPT, **TEXT, "optimizer": {"use": optimizer, "lr": 1e-3}, "deterministic": True, "plan": plan}
    undisturbed = finished(live_run(folder, **changes))
    first = live_run(folder, **changes)
    first.stop.look_every_seconds = 0.0
    schedule = first.schedule

    def watched(position: int) -> float:
        if first.state.step == 9:
            request_stop(first.run, "check")
        return schedule(position)

    first.schedule = watched
    finished(first)
    first.run.stop_file.unlink()
    assert first.state.step < 30, first.state.step
    rows = finished(live_run(folder, attempt=2, run=first.run, **changes))
    assert [row["loss"] for row in rows] == [row["loss"] for row in undisturbed]
    print(f"{optimizer}, {precision}: stopped at step {first.state.step} and resumed: {len(rows)} losses bit for bit")


def check_own_loop(folder: Path) -> None:
    """A model that was built on the host, in a loop of its own: on the GPU, without waiting, with a falling loss."""
    recipe = Recipe.from_document({"name": "own", "batch": 256, "steps": 40, "seed": 1, "log_every": 1})
    choice = default_plan(recipe, detect_cluster(), 1)
    run = Run(recipe, Place(alone(DEVICE), RunDirectory.create(folder, "own"), 1, choice, True, ExitStack()))
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 10))
    x = torch.randn(4096, 64)
    data = torch.utils.data.TensorDataset(x, x[:, :10].argmax(1))
    model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    for inputs, target in run.batches(data):
        torch.cuda.set_sync_debug_mode("error" if run.steps_done >= 5 else "default")  # the first steps compile
        loss = torch.nn.functional.cross_entropy(model(inputs), target)
        run.step(loss)
        torch.cuda.set_sync_debug_mode("default")  # loading is allowed to wait for the host
    results = run.evaluate(data, lambda batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]))
    run.finish()
    losses = [row["loss"] for row in read_metrics(run._place.run) if "loss" in row]
    assert results["loss"] < losses[0] / 2, (losses[0], results)
    plan = choice.plan
    print(f"own loop: loss {losses[0]:.3f} -> {results['loss']:.3f}, no step waits ({plan.precision}, {plan.compile})")


def check_fine_tuning(folder: Path) -> None:
    """Train, start from that with adapters and a moving average: the first loss is where the base ended."""
    base = live_run(folder, **GPT, **TEXT, **ADAMW, plan={"compile": False})
    finished(base)
    changes = {"model": {**GPT["model"], "weights": str(base.run.path)}, "lora": {"rank": 8}}
    tuned = live_run(folder, **TEXT, **ADAMW, **changes, hooks=[{"use": "ema", "decay": 0.9}], evaluate={"every": 10})
    rows = finished(tuned)
    trained = sum(p.numel() for p in tuned.model.parameters() if p.requires_grad)
    last = [row for row in rows if "validation_ema_loss" in row][-1]
    base_last = read_metrics(base.run)[-1]["loss"]
    assert abs(rows[0]["loss"] - base_last) < 0.3, (rows[0]["loss"], base_last)
    figures = (
        f"{base_last:.3f} -> {rows[0]['loss']:.3f} -> {rows[-1]['loss']:.3f}, average {last['validation_ema_loss']:.3f}"
    )
    print(f"lora on a trained base, {trained:,} parameters trained: {figures}", flush=True)


def check_hugging_face(folder: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = {"use": "huggingface", "task": "causal-lm", "config": config, "vocabulary": 256, "context": 256}
    for compile in (False, True):
        rows = finished(live_run(folder, model=model, **TEXT, **ADAMW, plan={"compile": compile}))
        assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
        losses = f"loss {rows[0]['loss']:.3f} -> {rows[-1]['loss']:.3f}"
        print(
            f"Hugging Face Llama, compile {compile}: {losses}, {rows[-2]['tokens_per_second']:,.0f} tokens/s",
            flush=True,
        )


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check_no_step_waits(folder, "gpt", **GPT, **TEXT, **ADAMW)
        check_no_step_waits(folder, "gpt fp16", **GPT, **TEXT, **ADAMW, plan={"precision": "fp16", "compile": False})
        accumulating = {"micro_batch": 8, "compile": False}
        check_no_step_waits(folder, "gpt accumulating", **GPT, **TEXT, **ADAMW, plan=accumulating)
        check_no_step_waits(folder, "simple-cnn with loader workers", **CNN, plan={"compile": False})
        for precision, compile in (("fp32", False), ("tf32", False), ("bf16", True), ("fp16", False)):
            check_precision(folder, precision, compile)
        for optimizer, precision in (("adamw", "bf16"), ("lamb", "fp16"), ("lars", "fp16"), ("adadelta", "fp32")):
            check_resume(folder, optimizer, precision)
        check_own_loop(folder)
        check_fine_tuning(folder)
        check_hugging_face(folder)
    print("all checks passed")


if __name__ == "__main__":
    main()
