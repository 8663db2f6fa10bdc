"""Pictures decoded and resized by NVIDIA DALI, on the processors of a loader worker."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradus.data.cuts import Content, Cut, Pixels

PACKAGE, INSTALL = "nvidia.dali", "pip install nvidia-dali-cuda120"
_PIPELINES: dict[tuple[int, int], tuple[int, Any]] = {}  # by process and size of a picture: the most at once, and it


def pictures(contents: Sequence[Content], cuts: Sequence[Cut], size: int) -> Pixels:
    """[N, 3, size, size]. Raises whatever DALI does if one of them cannot be decoded."""
    key = (os.getpid(), size)
    most, pipeline = _PIPELINES.get(key, (0, None))
    if most < len(contents):
        most, pipeline = len(contents), _pipeline(len(contents), size)
        _PIPELINES[key] = most, pipeline
    corners = [((cut.top, cut.left), (cut.top + cut.height, cut.left + cut.width)) for cut in cuts]
    try:
        pipeline.feed_input("contents", [np.frombuffer(content, np.uint8) for content in contents])
        pipeline.feed_input("starts", [np.array(start, np.float32) for start, _ in corners])
        pipeline.feed_input("ends", [np.array(end, np.float32) for _, end in corners])
        pipeline.feed_input("mirrored", [np.array(cut.mirrored, np.int32) for cut in cuts])
        (found,) = pipeline.run()
    except Exception:
        _PIPELINES.pop(key, None)  # it is of no use any more
        raise
    return np.array(found.as_array())


def _pipeline(most: int, size: int) -> Any:
    from nvidia.dali import fn, pipeline_def, types

    def decoding() -> Any:
        encoded = fn.external_source(name="contents", dtype=types.UINT8, ndim=1)
        starts = fn.external_source(name="starts", dtype=types.FLOAT, ndim=1)
        ends = fn.external_source(name="ends", dtype=types.FLOAT, ndim=1)
        mirrored = fn.external_source(name="mirrored", dtype=types.INT32, ndim=0)
        whole = fn.decoders.image(encoded, device="cpu", output_type=types.RGB, adjust_orientation=False)
        resized = fn.resize(
            whole,
            size=[size, size],
            roi_start=starts,
            roi_end=ends,
            roi_relative=False,
            interp_type=types.INTERP_LINEAR,
            antialias=True,
        )
        return fn.transpose(fn.flip(resized, horizontal=mirrored), perm=[2, 0, 1])

    make: Any = pipeline_def(
        batch_size=most,
        num_threads=1,  # workers are the parallelism
        device_id=None,
        prefetch_queue_depth=1,
        exec_pipelined=False,
        exec_async=False,
    )
    pipeline = make(decoding)()
    pipeline.build()
    return pipeline
