"""Reading traces: whole, cut, damaged, and what is no trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from synthetic_traces import ADD, Trace

from gradus.diagnosis.timeline import trace_file
from gradus.diagnosis.timeline.analysis import analyse
from gradus.diagnosis.timeline.trace_file import TraceFile
from gradus.schema.errors import InputError


def long_trace(steps: int = 50) -> Trace:
    trace = Trace()
    for step in range(steps):
        trace.step(1000 * step, 1000 * step + 1000)
        trace.kernel(ADD, 1000 * step + 100, 1000 * step + 400, launched=1000 * step + 90)
    return trace


@pytest.mark.parametrize("piece", [17, 200, 1 << 22])
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_events_are_those_of_json_whatever_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, name: str
) -> None:
    trace = long_trace(5)
    trace.op('a "quoted" {name} [with], \\ all é', 10, 20)
    monkeypatch.setattr(trace_file, "_PIECE", piece)
    file = TraceFile(trace.write(tmp_path / name))
    assert list(file) == json.loads(trace.text)["traceEvents"]
    assert file.about["traceName"] == "made up"
    assert not file.truncated


def test_a_list_of_events_alone_is_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = json.dumps(long_trace(3).events)
    path.write_text(text)
    assert (analyse(path).steps, analyse(path).truncated) == (3, False)
    path.write_text(text[: len(text) // 2])
    assert (analyse(path).steps, analyse(path).truncated) == (2, True)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_that_was_cut_is_analysed_as_far_as_it_goes(tmp_path: Path, share: float, name: str) -> None:
    path = long_trace().write(tmp_path / name)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    found = analyse(path)
    assert found.truncated
    assert 0 < found.steps < 50
    assert found.busy_seconds == pytest.approx(300e-6 * found.kernels)
    assert any("cut" in line for line in found.not_measured)


def test_a_damaged_end_of_compressed_data_is_as_good_as_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "_PIECE", 256)
    path = long_trace().write(tmp_path / "trace.json.gz")
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = b"\xff" * (len(data) - len(data) // 2)
    path.write_bytes(bytes(data))
    found = analyse(path)
    assert found.truncated
    assert found.kernels > 0


def test_a_broken_event_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "_SUSPECT", 2000)
    trace = long_trace()
    text = trace.text.replace('"dur": 300', '"dur": 3x0', 1)
    path = tmp_path / "trace.json"
    path.write_text(text)
    found = analyse(path)
    assert found.kernels == 49
    assert "1 event that could not be read" in found.not_measured


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"   \n", "empty"),
        (b"loss,step\n1,2\n", "no trace"),
        (b'{"step": 1, "loss": 2.0}\n', "no traceEvents"),
        (b'{"traceEvents": 5}', "no traceEvents"),
        (b'{"traceEvents": []}', "empty"),
        (b'{"traceEvents": [{"ph": "M", "name": "x"}]}', "empty"),
        (b"{]", "no trace"),
        (b"\x1f\x8b\x08\x00" + b"garbage" * 10, "no trace"),
        (gzip.compress(b"hello", mtime=0), "no trace"),
        (b"\x80\x02}q\x00.", "no trace"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said) as refused:
        analyse(path)
    assert refused.value.details["file"] == str(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        analyse(tmp_path / "none.json")
