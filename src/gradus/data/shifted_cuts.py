"""Shifted cuts: small pictures moved by a few pixels, perhaps mirrored, a whole batch at once on the training device.

As He et al. trained on CIFAR-10 (Deep Residual Learning for Image Recognition, 2015, section 4.2): a picture of 32 × 32
pixels gets a frame of 4 black ones at each side, and the model sees a random cut of 32 × 32, or its mirror image. The
host draws the cuts, as one number for each picture; the device makes them. No torch unless there is a batch to cut.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from gradus.data.order import Indices, Words

FRAMES_IN_A_SIDE = 8  # 4 pixels of 32


def drawn_cuts(draws: Words, height: int, width: int, *, mirrors: bool) -> Indices:
    """For each random word a cut: twice the place in the framed picture where it begins, plus one if it is mirrored."""
    down, across = frame(height), frame(width)
    rest, top = np.divmod(draws, np.uint64(2 * down + 1))
    rest, left = np.divmod(rest, np.uint64(2 * across + 1))
    begin = top * np.uint64(width + 2 * across) + left
    mirrored = rest & np.uint64(mirrors)
    cuts: Words = begin << np.uint64(1) | mirrored
    return cuts.astype(np.int64)


def frame(side: int) -> int:
    """How many black pixels are put before and after a side of so many."""
    return max(1, side // FRAMES_IN_A_SIDE)


def cut_out(images: Any, cuts: Any) -> Any:
    """Of each picture in [N, C, H, W], its cut. Few kernels for any number of pictures, and nothing to wait for."""
    from torch.nn.functional import pad

    _, channels, height, width = images.shape
    down, across = frame(height), frame(width)
    framed = pad(images, (across, across, down, down))
    wanted = _first_cut(height, width, images.device).index_select(0, cuts & 1).add_((cuts >> 1)[:, None])
    # The same pixels of each channel, by a view: indices of eight bytes take more memory than the pictures.
    return framed.flatten(2).gather(2, wanted[:, None].expand(-1, channels, -1)).view_as(images)


@cache
def _first_cut(height: int, width: int, device: Any) -> Any:
    """[2, H x W]: where the pixels of the cut in the upper left corner are in a framed picture; and mirrored."""
    import torch

    rows = torch.arange(height, device=device)[:, None] * (width + 2 * frame(width))
    columns = torch.arange(width, device=device)
    return torch.stack([rows + columns, rows + columns.flip(0)]).flatten(1)
