"""What the cases of plan_cases.py really need and take on the device at hand, for plan_accuracy.py to compare with.

    python benchmarks/measure_cases.py                        # the eager cases, one after the other in this process
    python benchmarks/measure_cases.py --compiled             # those with compile: true
    python benchmarks/measure_cases.py --sharded              # two ranks that share the GPU, each case at the same time
    python benchmarks/measure_cases.py --caps --peaks measured.json   # with a memory limit near the measured peak
    python benchmarks/measure_cases.py --only "gpt2 b32 bf16,unet b128 bf16" --limit-seconds 60
    python benchmarks/measure_cases.py --small                # tiny models, on any machine; memory is None on a CPU

Results are written after each case, to cases.json and what the profiler saw to kernels.json, both in --out. Each case
trains through gradus's own step on batches that were made beforehand, so that no step waits for data.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from case_ranks import launched, measure_rank
from case_runs import DEVICE, ON_GPU, live_run
from plan_cases import CAPS, CASES, COMPILED, SHARDED, Case, capped, named, needed_bytes, small

from gradus.data.loader import MicroBatch
from gradus.parallel.world import alone
from gradus.record.directory import RunDirectory
from gradus.training.device import limit_memory
from gradus.training.live_run import LiveRun
from gradus.training.memory import memory_of

WARM_UP = 3
TIMED_SECONDS = 3.0  # that the timed steps of a case take, if that many steps are not too few or too many
LARGEST_ROWS = 40  # of what the profiler saw
Row = dict[str, Any]


def clean() -> None:
    """As little as can be is left of the case before."""
    gc.collect()
    torch._dynamo.reset()
    if ON_GPU:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def allocated() -> int | None:
    return torch.cuda.memory_allocated() if ON_GPU else None


def peak() -> int | None:
    """Bytes allocated at most since the last time that this was asked."""
    if not ON_GPU:
        return None
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


class Moment:
    """A point in the work of the device: on a GPU without waiting for it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if ON_GPU else None
        self._at = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def seconds_since(self, earlier: Moment) -> float:
        """To be asked after the device has been waited for."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return earlier._event.elapsed_time(self._event) / 1000


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


class Steps:
    """The steps of a case, one after another."""

    def __init__(self, live: LiveRun) -> None:
        self.live = live
        self.number = 0
        self._batches: Iterator[MicroBatch] = live.loader.micro_batches(0, live.total_steps)

    def run(self) -> Any:
        pending = self.live.step.run(self._batches, self.number, self.live.schedule(self.number), measure_norm=False)
        self.number += 1
        return pending

    def by_phase(self) -> tuple[list[tuple[str, Moment]], list[tuple[str, int | None, int | None]]]:
        """One step, with the moments at which its phases end, and of each its peak and what is left after it."""
        step, moments, memory = self.live.step, [("", Moment())], []
        peak()

        def ends(phase: str) -> None:
            moments.append((phase, Moment()))
            memory.append((phase, peak(), allocated()))

        def micro_batch() -> None:  # a function, so that nothing of a micro-batch lives on when it is done
            micro = next(self._batches)
            ends("data")
            assert step._objective is not None
            with step.forward(micro, self.number):
                losses = step._objective(step.model, micro.inputs, micro.samples)
            ends("forward")
            step.backward(losses.loss_sum, losses.count)
            ends("backward")

        for _ in range(step.accumulate):
            micro_batch()
        step.apply(self.live.schedule(self.number), False)
        ends("optimizer")
        self.number += 1
        return moments, memory


def phases(steps: Steps, count: int) -> Row:
    """Seconds and bytes of the phases of a step; of several micro-batches, their sum and the largest."""
    seconds: dict[str, list[float]] = {}
    bytes_: dict[str, dict[str, int]] = {}
    for _ in range(count):
        moments, memory = steps.by_phase()
        wait()
        once: dict[str, float] = {}
        for (_, before), (phase, after) in itertools.pairwise(moments):
            once[phase] = once.get(phase, 0.0) + after.seconds_since(before)
        for phase, value in once.items():
            seconds.setdefault(phase, []).append(value)
        for phase, highest, left in memory:
            if highest is not None and left is not None:
                kept = bytes_.setdefault(phase, {"peak": 0, "after": 0})
                kept["peak"], kept["after"] = max(kept["peak"], highest), max(kept["after"], left)
    return {"phase_seconds": {p: statistics.median(v) for p, v in seconds.items()}, "phase_bytes": bytes_ or None}


def profiled(steps: Steps, count: int) -> Row:
    """Device and host seconds of a step by operator, by operator and shape, and by kernel, the largest first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(count):
            steps.run()
        wait()

    def row(event: Any, **more: Any) -> Row:
        return {
            "name": event.key[:160],
            **more,
            "calls": event.count / count,
            "device_seconds": event.self_device_time_total / 1e6 / count,
            "host_seconds": event.self_cpu_time_total / 1e6 / count,
        }

    averages, by_shape = profiler.key_averages(), profiler.key_averages(group_by_input_shape=True)
    kernels = [e for e in averages if e.device_type != DeviceType.CPU and not getattr(e, "is_user_annotation", False)]
    operators = [e for e in averages if e.device_type == DeviceType.CPU]
    shaped = [e for e in by_shape if e.device_type == DeviceType.CPU and (e.self_device_time_total or not ON_GPU)]

    def largest(events: list[Any]) -> list[Any]:
        return sorted(events, key=lambda e: (-e.self_device_time_total, -e.self_cpu_time_total))[:LARGEST_ROWS]

    return {
        "device_seconds": sum(e.self_device_time_total for e in kernels) / 1e6 / count,
        "kernels": sum(e.count for e in kernels) / count,
        "by_operator": [row(e) for e in largest(operators)],
        "by_shape": [row(e, shapes=str(e.input_shapes)[:200]) for e in largest(shaped)],
        "by_kernel": [row(e) for e in largest(kernels)],
    }


def measured(case: Case, folder: Path, with_profile: bool) -> tuple[Row, Row]:
    """All that is recorded of a case, and what the profiler saw."""
    clean()
    began = time.perf_counter()
    row: Row = {"before_bytes": allocated()}
    live = live_run(case, RunDirectory.create(folder, "case"), alone(DEVICE))
    try:
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
        wait()
        build_peak = peak()  # of building, which a step is not: asking resets it
        row |= {
            "build_seconds": time.perf_counter() - began,
            "built_bytes": allocated(),
            "build_peak_bytes": build_peak,
        }
        row["parameters"], row["trained"] = live.parameter_counts
        steps = Steps(live)
        first = time.perf_counter()
        loss = steps.run().wait().loss
        row |= {"first_step_seconds": time.perf_counter() - first, "first_step_peak_bytes": peak()}
        for _ in range(WARM_UP - 1):
            last = time.perf_counter()
            steps.run()
            wait()
        once = time.perf_counter() - last
        row["second_step_peak_bytes"] = peak()
        count = max(4, min(12, math.ceil(TIMED_SECONDS / once)))
        moments, late = [Moment()], None
        for _ in range(count):
            pending = steps.run()
            moments.append(Moment())
            if late is not None:  # as in the real loop: the host is a step ahead, and no more
                late.wait()
            late = pending
        wait()
        seconds = [after.seconds_since(before) for before, after in itertools.pairwise(moments)]
        quarters = statistics.quantiles(seconds, n=4)
        row |= {
            "step_seconds": statistics.median(seconds),
            "step_seconds_spread": quarters[2] - quarters[0],
            "steps": count,
            "loss_first": loss,
            "loss": pending.wait().loss,
            "steady_peak_bytes": peak(),
            "between_steps_bytes": allocated(),
            "state_bytes": asdict(memory_of(live.step.model, live.optimizer, DEVICE)),
        }
        if ON_GPU:
            highest = max(row[f"{which}_peak_bytes"] for which in ("first_step", "second_step", "steady"))
            row["peak_bytes"] = highest - row["before_bytes"]  # what an earlier case left behind is not this one's
            row["reserved_bytes"] = torch.cuda.memory_reserved()
            free, total = torch.cuda.mem_get_info()
            row["outside_allocator_bytes"] = total - free - torch.cuda.memory_reserved()
        row |= phases(steps, 3 if once < 0.7 else 2)
        try:
            kernels = profiled(steps, 2 if once < 0.4 else 1) if with_profile else {}
        except Exception as error:  # the rest is worth having without it
            kernels = {"failed": repr(error)}
        row |= {key: kernels[key] for key in ("device_seconds", "kernels") if key in kernels}
        if ON_GPU:
            before = torch.cuda.memory_allocated()
            torch._C._cuda_clearCublasWorkspaces()
            row["cublas_workspace_bytes"] = before - torch.cuda.memory_allocated()
        row["seconds"] = time.perf_counter() - began
        return row, kernels
    finally:
        live.recorder.close(state="finished")


def under_limit(case: Case, limit_bytes: float, folder: Path) -> Row:
    """Whether three steps run with so much memory and no more."""
    clean()
    case = capped(case, limit_bytes)
    limit_memory(DEVICE, limit_bytes / 2**30)
    live = None
    try:
        live = live_run(case, RunDirectory.create(folder, "case"), alone(DEVICE))
        steps = Steps(live)
        for _ in range(3):
            steps.run().wait()
        return {"ran": True, "limit_bytes": limit_bytes, "peak_bytes": peak()}
    except Exception as error:
        if "out of memory" not in str(error).lower():
            raise
        return {"ran": False, "limit_bytes": limit_bytes, "peak_bytes": peak(), "said": str(error).splitlines()[0]}
    finally:
        if live is not None:
            live.recorder.close(state="finished")
        if ON_GPU:
            torch.cuda.set_per_process_memory_fraction(1.0)


class Results:
    """What was found so far, in files that are complete after each case."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        name = torch.cuda.get_device_name() if ON_GPU else "CPU"
        self.cases: dict[str, Any] = {"device": name, "torch": torch.__version__, "cases": {}}
        if ON_GPU:
            self.cases["total_bytes"] = torch.cuda.get_device_properties(DEVICE).total_memory
        self.kernels: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, row: Row, kernels: Row | None = None) -> None:
        self.cases["cases"][name] = row
        self._write("cases.json", self.cases)
        if kernels is not None:
            self.kernels[name] = kernels
            self._write("kernels.json", self.kernels)

    def _write(self, file: str, document: Any) -> None:
        part = self._folder / f"{file}.part"
        part.write_text(json.dumps(document, indent=1))
        part.replace(self._folder / file)


def line_of(name: str, row: Row) -> str:
    if "failed" in row:
        return f"{name}: FAILED {row['failed']}"
    if "ran" in row:
        return f"{name}: {'ran' if row['ran'] else 'out of memory'} with {row['limit_bytes'] / 2**30:.2f} GiB"
    if "ranks" in row:
        return f"{name}: " + ", ".join(f"{(rank['peak_bytes'] or 0) / 2**30:.2f} GiB" for rank in row["ranks"])
    memory = "" if row.get("peak_bytes") is None else f", {row['peak_bytes'] / 2**30:.2f} GiB"
    took = [row[key] for key in ("build_seconds", "first_step_seconds", "seconds")]
    took_text = "built in {:.1f} s, first step {:.1f} s, all {:.1f} s".format(*took)
    return f"{name}: {row['step_seconds'] * 1000:.1f} ms{memory}, loss {row['loss']:.3f} ({took_text})"


def attempted(case: Case, folder: Path, limit_bytes: float | None, with_profile: bool) -> tuple[Row, Row | None]:
    """A row also for what fails. Of the exception only its text is kept: it holds the tensors of all its frames."""
    try:
        if limit_bytes is not None:
            return under_limit(case, limit_bytes, folder), None
        return measured(case, folder, with_profile)
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {str(error)[:400]}"}, None


def wanted(arguments: argparse.Namespace) -> list[tuple[str, Case, float | None]]:
    """Names, cases, and limits in bytes if there are any."""
    if arguments.caps:
        peaks = json.loads(arguments.peaks.read_text())["cases"] if arguments.peaks.exists() else {}
        chosen = []
        for cap in CAPS:
            found = needed_bytes(peaks.get(cap.case, {})) or (2**30 if arguments.small else None)
            if found is None:
                print(f"{cap.name}: the case has not been measured", flush=True)
            else:
                chosen.append((cap.name, named(cap.case), cap.of_peak * found))
    else:
        chosen = [(case.name, case, None) for case in (COMPILED if arguments.compiled else CASES)]
    if arguments.only:
        names = [name.strip() for name in arguments.only.split(",")]
        chosen = [one for one in chosen if one[0] in names]
    skipped = [name.strip() for name in arguments.skip.split(",")]
    return [one for one in chosen if one[0] not in skipped]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of cases, with commas")
    parser.add_argument("--skip", default="", help="names of cases, with commas")
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="begin no case after so long")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--caps", action="store_true")
    parser.add_argument("--peaks", type=Path, default=Path(__file__).with_name("measured") / "h200.json")
    parser.add_argument("--no-profile", action="store_true", help="without what torch's profiler sees")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("measured"))
    parser.add_argument("--rank", nargs=2, metavar=("CASE", "FOLDER"), help="be one of the ranks of a sharded case")
    arguments = parser.parse_args()
    if arguments.rank:
        measure_rank(arguments.rank[0], Path(arguments.rank[1]), arguments.small)
    began = time.monotonic()
    results = Results(arguments.out)
    if arguments.sharded:
        with tempfile.TemporaryDirectory() as folder:
            for name, row in launched([case.name for case in SHARDED], Path(folder), arguments.small):
                results.add(name, row)
                print(line_of(name, row), flush=True)
        return
    for name, case, limit_bytes in wanted(arguments):
        if time.monotonic() - began > arguments.limit_seconds:
            print(f"{name}: left out, {arguments.limit_seconds:g} s are over", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            case = small(case) if arguments.small else case
            row, kernels = attempted(case, Path(folder), limit_bytes, not arguments.no_profile)
        row["held_out"] = case.held_out
        results.add(name, row, kernels)
        print(line_of(name, row), flush=True)


if __name__ == "__main__":
    main()
