import math
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from gradus.record.outcome import read_outcome, write_outcome


def claim(run, rank: int) -> bool:
    return write_outcome(run, 1, {"rank": rank, "text": "x" * 10000})


def test_of_many_ranks_the_first_outcome_stands(run):
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as ranks:
        won = list(ranks.map(partial(claim, run), range(16)))
    assert won.count(True) == 1
    assert read_outcome(run, 1)["rank"] == won.index(True)
    assert [path.name for path in run.control.iterdir()] == ["outcome-1.json"]


def test_each_attempt_has_its_own_outcome(run):
    assert read_outcome(run, 1) is None
    assert write_outcome(run, 1, {"exit_code": 75})
    assert write_outcome(run, 2, {"exit_code": 93, "loss": math.nan})
    assert read_outcome(run, 1) == {"exit_code": 75}
    assert math.isnan(read_outcome(run, 2)["loss"])
