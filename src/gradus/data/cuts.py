"""Cuts: which part of a picture is seen. The middle of it or, to see more in each epoch, a part drawn at random."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import GOLDEN, Words, mix

Pixels = NDArray[np.uint8]
Content = bytes | bytearray | memoryview  # of a file with a picture

# The random crop that Szegedy et al. trained with (Going Deeper with Convolutions, 2014, section 6): between 8 % and
# all of the area, sides between 3 to 4 and 4 to 3.
AREA = (0.08, 1.0)
LOG_RATIO = (math.log(3 / 4), math.log(4 / 3))
ATTEMPTS = 10  # a crop may not fit into the picture; after so many, the middle is taken. As torchvision does
NUMBERS = 4 * ATTEMPTS + 1  # random ones for each picture


@dataclass(frozen=True)
class Cut:
    """A part of a picture, in its pixels."""

    left: int
    top: int
    width: int
    height: int
    mirrored: bool = False


def middle(width: int, height: int) -> Cut:
    """The largest square in the middle."""
    side = min(width, height)
    return Cut((width - side) // 2, (height - side) // 2, side, side)


def random_cut(numbers: NDArray[np.float64], width: int, height: int) -> Cut:
    """A random resized crop, mirrored half of the time; `numbers` are uniform in [0, 1) and decide everything."""
    mirrored = bool(numbers[-1] < 0.5)
    for area, ratio, across, down in numbers[:-1].reshape(ATTEMPTS, 4).tolist():
        pixels = width * height * (AREA[0] + area * (AREA[1] - AREA[0]))
        sides = math.exp(LOG_RATIO[0] + ratio * (LOG_RATIO[1] - LOG_RATIO[0]))
        wide, high = round(math.sqrt(pixels * sides)), round(math.sqrt(pixels / sides))
        if 0 < wide <= width and 0 < high <= height:
            return Cut(int(across * (width - wide + 1)), int(down * (height - high + 1)), wide, high, mirrored)
    # A long strip: as much of its middle as has sides of the ratio allowed.
    wide = min(width, round(height * 4 / 3))
    high = min(height, round(width * 4 / 3))
    return Cut((width - wide) // 2, (height - high) // 2, wide, high, mirrored)


def uniform(draws: Words) -> NDArray[np.float64]:
    """[len(draws), NUMBERS]: for each picture its random numbers, which follow from its word alone."""
    counters = np.arange(NUMBERS, dtype=np.uint64)
    numbers: NDArray[np.float64] = (mix(counters * GOLDEN + draws[:, None]) >> np.uint64(11)) * 2.0**-53
    return numbers
