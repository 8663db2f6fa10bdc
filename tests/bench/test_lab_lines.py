"""The lines of the lab are written and read to the letter."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradus.bench.lab_lines import LabResult, iteration_line, read_log
from gradus.schema.errors import InputError

LOGS = Path(__file__).parent / "logs"


@pytest.mark.parametrize("log", ["pytorch-1.txt", "pytorch-2.txt"])
def test_the_labs_iterations_give_the_labs_last_lines(log):
    text = (LOGS / log).read_text()
    read = read_log(LOGS / log)
    written = LabResult.of_iterations(read.iterations, read.devices, read.device, read.unit)
    for number, rate in enumerate(read.iterations):
        assert iteration_line(number, rate, "GPU", "img") in text
    each, total = written.lines
    assert each in text
    # Of two GPUs the lab adds up what it had not rounded yet; to the rate itself that makes no difference.
    assert total.partition(" +-")[0] in text


def test_a_log_is_read_as_it_was_printed():
    found = read_log(LOGS / "pytorch-2.txt")
    assert (found.devices, found.device, found.unit) == (2, "GPU", "img")
    assert found.iterations == (326.8, 325.6, 324.3, 324.5, 324.6)
    assert (found.each, found.each_plus_minus) == (325.2, 1.8)
    assert (found.total, found.total_plus_minus) == (650.3, 3.6)


def test_of_several_results_in_a_log_the_last_counts_and_srun_s_labels_do_not_matter(tmp_path):
    first, last = ((LOGS / name).read_text() for name in ("pytorch-1.txt", "pytorch-2.txt"))
    log = tmp_path / "log"
    log.write_text(first + "".join(f"0: {line}\n" for line in last.splitlines()))
    assert read_log(log) == read_log(LOGS / "pytorch-2.txt")


def test_text_models_and_cpus_have_their_own_words(tmp_path):
    written = LabResult.of_iterations([2.0, 4.0], 2, "CPU", "seq")
    assert written.lines == ["Seq/sec per CPU: 3.0 +-2.0", "Total seq/sec on 2 CPU(s): 6.0 +-3.9"]
    log = tmp_path / "log"
    log.write_text(
        "\n".join([iteration_line(0, 2.0, "CPU", "seq"), iteration_line(1, 4.0, "CPU", "seq"), *written.lines])
    )
    read = read_log(log)
    assert (read.unit, read.device, read.iterations, read.total) == ("seq", "CPU", (2.0, 4.0), 6.0)


@pytest.mark.parametrize("text", ["", "Img/sec per GPU: 336.0 +-0.2\n", "Total img/sec on 0 GPU(s): 0.0 +-0.0\n"])
def test_a_log_without_a_total_is_bad_input(tmp_path, text):
    log = tmp_path / "log"
    log.write_text(text)
    with pytest.raises(InputError, match="log"):
        read_log(log)


def test_a_log_that_is_not_there_is_bad_input(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_log(tmp_path / "log")
