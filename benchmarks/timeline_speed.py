"""How long the analysis of a big trace takes, and how much memory: a synthetic trace of a gigabyte.

    python benchmarks/timeline_speed.py --out FOLDER [--small]

The trace looks as torch's profiler writes those of a GPU: operators, launches and kernels, each with its arguments.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

_OPERATOR = """  {{
    "ph": "X", "cat": "cpu_op", "name": "{name}", "pid": 1, "tid": 7,
    "ts": {ts:.3f}, "dur": {dur:.3f},
    "args": {{
      "External id": {link},"Record function id": 0, "Concrete Inputs": ["", "", ""], "Input type": ["c10::BFloat16"],
      "Input Strides": [[4096, 1], [1, 4096]], "Input Dims": [[8192, 4096], [4096, 4096]], "Ev Idx": {link}
    }}
  }},
"""
_LAUNCH = """  {{
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 7,
    "ts": {ts:.3f}, "dur": {dur:.3f},
    "args": {{
      "External id": {link}, "cbid": 211, "correlation": {link}
    }}
  }},
  {{
    "ph": "s", "id": {link}, "pid": 1, "tid": 7, "ts": {ts:.3f},
    "cat": "ac2g", "name": "ac2g"
  }},
"""
_KERNEL = """  {{
    "ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": {stream},
    "ts": {ts:.3f}, "dur": {dur:.3f},
    "args": {{
      "External id": {link}, "queued": 0, "device": 0, "context": 1, "stream": {stream}, "correlation": {link},
      "registers per thread": 128, "shared memory": 65536, "blocks per SM": 4.8, "warps per SM": 38.7,
      "grid": [512, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 37
    }}
  }},
"""
_STEP = """  {{
    "ph": "X", "cat": "user_annotation", "name": "gradus:step", "pid": 1, "tid": 7,
    "ts": {ts:.3f}, "dur": {dur:.3f}, "args": {{"External id": 1}}
  }},
"""
_NAMES = (
    ("aten::mm", "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT"),
    ("aten::add_", "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"),
    ("aten::native_layer_norm", "void at::native::vectorized_layer_norm_kernel<c10::BFloat16, float>"),
    ("c10d::allreduce_", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
)


def write_trace(file: TextIO, size: int) -> None:
    """Steps of 2,000 kernels until the file has so many bytes."""
    file.write('{\n  "schemaVersion": 1,\n  "deviceProperties": [{"id": 0, "name": "GPU"}],\n  "traceEvents": [\n')
    written, link, now = 0, 0, 1e9
    while written < size:
        began = now
        for _ in range(2000):
            operator, kernel = _NAMES[link % len(_NAMES)]
            link += 1
            values = {"link": link, "ts": now, "dur": 9.0}
            written += file.write(_OPERATOR.format(name=operator, **values))
            written += file.write(_LAUNCH.format(link=link, ts=now + 2, dur=5.0))
            stream = 20 if operator.startswith("c10d") else 7
            written += file.write(_KERNEL.format(name=kernel, stream=stream, link=link, ts=now + 8, dur=12.0))
            now += 10.0
        written += file.write(_STEP.format(ts=began, dur=now - began))
    file.write('  {"ph": "M", "name": "end", "pid": 1}\n  ]\n}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--small", action="store_true", help="20 MB")
    parser.add_argument("--analyse", type=Path, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.analyse is not None:
        _analyse(options.analyse)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    trace = options.out / "trace.json"
    with trace.open("w") as file:
        write_trace(file, (20 if options.small else options.megabytes) * 10**6)
    done = subprocess.run(
        [sys.executable, __file__, "--out", str(options.out), "--analyse", str(trace)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    found["bytes"] = trace.stat().st_size
    trace.unlink()
    (options.out / "timeline_speed.json").write_text(json.dumps(found, indent=1))
    print(f"{'trace':>10} {'kernels':>10} {'seconds':>9} {'CPU seconds':>12} {'peak memory':>12}")
    print(
        f"{found['bytes'] / 1e9:>7.2f} GB {found['kernels']:>10,} {found['seconds']:>9.1f} "
        f"{found['cpu_seconds']:>12.1f} {found['peak_bytes'] / 2**30:>8.2f} GiB"
    )


def _analyse(trace: Path) -> None:
    from gradus.diagnosis.timeline.analysis import analyse

    began, used = time.monotonic(), time.process_time()
    found = analyse(trace)
    document = {
        "kernels": found.kernels,
        "steps": found.steps,
        "busy_seconds": found.busy_seconds,
        "seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time() - used,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
