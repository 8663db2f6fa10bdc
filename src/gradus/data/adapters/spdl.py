"""Pictures decoded and resized by SPDL, which has FFmpeg do it, on the processors of a loader worker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradus.data.cuts import Content, Cut, Pixels

PACKAGE, INSTALL = "spdl.io", "pip install spdl-io, and the libraries of FFmpeg (Debian: apt install ffmpeg)"


def pictures(contents: Sequence[Content], cuts: Sequence[Cut], size: int) -> Pixels:
    """[N, 3, size, size]. Raises whatever SPDL does if one of them cannot be decoded."""
    from spdl import io

    found = np.empty((len(contents), 3, size, size), np.uint8)
    for row, (content, cut) in enumerate(zip(contents, cuts, strict=True)):
        steps = [
            "format=pix_fmts=rgb24",  # first: colours that are stored for two pixels together cannot be cut apart
            f"crop={cut.width}:{cut.height}:{cut.left}:{cut.top}:exact=1",
            f"scale={size}:{size}:flags=bilinear+accurate_rnd",
            *(["hflip"] if cut.mirrored else []),
            "format=pix_fmts=rgb24",
        ]
        frames = io.decode_packets(io.demux_image(bytes(content)), filter_desc=",".join(steps))
        found[row] = io.to_numpy(io.convert_frames(frames)).transpose(2, 0, 1)
    return found
