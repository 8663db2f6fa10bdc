"""Traces as torch's profiler writes them, made up so that every answer is known. Times are in microseconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

GEMM = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
COMPUTE, TALK = 7, 20  # streams
MAIN = 100  # the thread that trains


class Trace:
    """Collects events. A kernel is given with the moment of its launch."""

    def __init__(self, **about: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self._about = about
        self._link = 0

    def add(self, category: str, name: str, start: float, end: float, thread: int = MAIN, **arguments: Any) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 1,
                "tid": thread,
                "ts": 5e9 + start,
                "dur": end - start,
                "args": arguments,
            }
        )

    def step(self, start: float, end: float) -> None:
        self.add("user_annotation", "gradus:step", start, end)

    def mark(self, name: str, start: float, end: float, thread: int = MAIN) -> None:
        self.add("user_annotation", name, start, end, thread)

    def op(self, name: str, start: float, end: float, thread: int = MAIN, **arguments: Any) -> None:
        self.add("cpu_op", name, start, end, thread, **arguments)

    def runtime(self, name: str, start: float, end: float, link: int = -1) -> None:
        self.add("cuda_runtime", name, start, end, correlation=link)

    def kernel(
        self, name: str, start: float, end: float, *, launched: float, stream: int = COMPUTE, **arguments: Any
    ) -> None:
        self._link += 1
        self.runtime("cudaLaunchKernel", launched, launched + 1, self._link)
        self.add("kernel", name, start, end, stream, stream=stream, correlation=self._link, **arguments)

    def copy(self, name: str, start: float, end: float, *, launched: float) -> None:
        self._link += 1
        self.runtime("cudaMemcpyAsync", launched, launched + 1, self._link)
        self.add("gpu_memcpy", name, start, end, COMPUTE, stream=COMPUTE, correlation=self._link)

    def frame(self, name: str, start: float, end: float, thread: int = MAIN) -> None:
        self.add("python_function", name, start, end, thread)

    @property
    def text(self) -> str:
        about = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], **self._about}
        head = json.dumps(about, indent=1)[:-2]
        events = ",\n  ".join(json.dumps(event, indent=1) for event in self.events)
        return f'{head},\n "traceEvents": [\n  {events}\n  ],\n "traceName": "made up"\n}}\n'

    def write(self, path: Path) -> Path:
        data = self.text.encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path
