import pytest

from gradus.record.format import bytes_text, count_text, duration_text, error_text, number_text, rate_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(25 * 2**30), "25 GiB"),
        (bytes_text(1.25 * 2**30), "1.25 GiB"),
        (bytes_text(2**20), "1 MiB"),
        (bytes_text(5000), "4.88 KiB"),
        (bytes_text(12), "12 B"),
        (bytes_text(0), "0 GiB"),
        (bytes_text(2048 * 2**30), "2,048 GiB"),
        (count_text(1, "step"), "1 step"),
        (count_text(2, "rank"), "2 ranks"),
        (count_text(0, "sample"), "0 samples"),
        (rate_text(41234, "tok"), "41.2 k tok/s"),
        (rate_text(7.25, "samples"), "7.25 samples/s"),
        (rate_text(999.9, "tok"), "1 k tok/s"),
        (rate_text(3.2e6, "tok"), "3.2 M tok/s"),
        (rate_text(3.2e9, "tok"), "3.2 G tok/s"),
        (duration_text(23.4), "0:23"),
        (duration_text(59.7), "1:00"),
        (duration_text(3723), "1:02:03"),
        (duration_text(2 * 86400 + 3 * 3600 + 4 * 60 + 5), "2 d 03:04:05"),
        (number_text(2.31416), "2.314"),
        (number_text(float("nan")), "nan"),
    ],
)
def test_numbers_read_well(text, expected):
    assert text == expected


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("too long\nby far"), "ValueError: too long"), (AssertionError(), "AssertionError")],
)
def test_an_error_is_told_in_a_line(error, text):
    assert error_text(error) == text
