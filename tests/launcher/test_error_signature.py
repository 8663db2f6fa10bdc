"""The same deterministic error has the same signature, and two different ones do not."""

from __future__ import annotations

import pytest

from gradus.launcher.error_signature import error_signature, innermost_user_frame, place_in_users_code

TRACE = """Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/gradus/training/rank.py", line 40, in run_rank
    train(live)
  File "/home/me/project/model.py", line 31, in forward
    return self.head(x)
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
ValueError: bad
"""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("index 12 is out of range", "index 4096 is out of range"),
        ("loss is -1.5e-07 at 0.25", "loss is 3 at 1,024.5"),
        ("object at 0x7f3a12 is gone", "object at 0x55aa is gone"),
        ("[2026-01-02T03:04:05.678+00:00] late", "[2026-11-12 13:14:15] late"),
        ("cannot read /scratch/job.11/a b", "cannot read /scratch/job.12/x b"),
        ("connection to 10.0.0.1:29500 refused", "connection to 192.168.4.12:41000 refused"),
        ("rank 3 on n2 was killed by SIGKILL", "rank 0 on n1 was killed by SIGKILL"),
    ],
)
def test_what_differs_each_time_is_left_out(one, other):
    signatures = {error_signature({"kind": "exception", "message": text}, ["n1", "n2"]) for text in (one, other)}
    assert len(signatures) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "hang", "message": "ValueError: bad", "traceback": TRACE},
        {"kind": "exception", "message": "KeyError: bad", "traceback": TRACE},
        {"kind": "exception", "message": "ValueError: bad", "traceback": TRACE.replace("line 31", "line 32")},
    ],
    ids=["kind", "message", "place"],
)
def test_another_kind_message_or_place_is_another_error(other):
    assert error_signature({"kind": "exception", "message": "ValueError: bad", "traceback": TRACE}) != error_signature(
        other
    )


def test_the_place_is_the_users_own_code_wherever_the_environment_lies():
    assert innermost_user_frame(TRACE) == "model.py:31 in forward"
    moved = TRACE.replace("/home/me/project", "/local/job.7/project").replace("/venv", "/local/job.7/venv")
    assert innermost_user_frame(moved) == "model.py:31 in forward"


def test_without_own_code_the_place_is_where_it_was_raised():
    trace = "\n".join(line for line in TRACE.splitlines() if "project" not in line and "head" not in line)
    assert innermost_user_frame(trace) == "linear.py:134 in forward"


def test_a_node_name_inside_a_word_is_left_alone():
    assert "cn1x" in str(error_signature({"kind": "k", "message": "cn1x n1"}, ["n1"])).replace("#", "1")


def test_no_error_has_no_signature():
    assert error_signature(None) is None


def test_the_place_to_look_at_is_a_line_of_the_users_own_code():
    traceback = """Traceback (most recent call last):
  File "/srv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1778, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "/home/me/broken.py", line 8, in forward
    return self.layre(x)
           ^^^^^^^^^^
  File "/srv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1967, in __getattr__
    raise AttributeError(
AttributeError: 'Broken' object has no attribute 'layre'
"""
    assert place_in_users_code(traceback) == "/home/me/broken.py, line 8, in forward: return self.layre(x)"
    assert place_in_users_code(traceback.replace("/home/me/", "/srv/site-packages/")) is None
