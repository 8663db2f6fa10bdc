"""The process of a rank: `python -m gradus.training.rank_process RUN ATTEMPT`.

Loading torch makes a million objects, none of which is garbage. Looking for some all the while takes an eighth of a
rank's start (2.7 s of processor time instead of 3.1, medians of six each, in turn, one core of an EPYC, November 2026),
and each later search through them would hold up a step.
"""

from __future__ import annotations

import gc

gc.disable()

from gradus.training.rank import main  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    main()
