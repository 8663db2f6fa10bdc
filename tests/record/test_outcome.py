import errno
import math
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest

from gradus.record.outcome import read_outcome, write_outcome


def failing(number: int):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def claim(run, rank: int) -> bool:
    return write_outcome(run, 1, {"rank": rank, "text": "x" * 10000})


@pytest.mark.parametrize("links", [0, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS])
def test_of_many_ranks_the_first_outcome_stands_with_hard_links_and_without(run, monkeypatch, links):
    if links:
        monkeypatch.setattr(os, "link", failing(links))
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


@pytest.mark.parametrize("content", ["", '{"state": "fini'])
def test_an_outcome_that_is_not_yet_whole_is_not_there_yet_and_still_the_first(run, monkeypatch, content):
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    run.outcome_path(1).write_text(content)
    assert read_outcome(run, 1) is None
    assert not write_outcome(run, 1, {"state": "failed"})
    assert run.outcome_path(1).read_text() == content


def test_without_hard_links_a_full_disk_leaves_no_half_outcome(run, monkeypatch):
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[:5]))
        with pytest.raises(OSError, match="No space left"):
            write_outcome(run, 1, {"state": "failed"})
    assert write_outcome(run, 1, {"state": "finished"})
    assert read_outcome(run, 1) == {"state": "finished"}


def test_any_other_failure_of_a_link_is_an_error(run, monkeypatch):
    monkeypatch.setattr(os, "link", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        write_outcome(run, 1, {"state": "failed"})
