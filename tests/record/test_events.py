import re

from gradus.record.events import EventWriter, Messages, read_events


def test_events_of_all_writers_are_merged_on_time(run):
    launcher, rank = EventWriter(run, "launcher"), EventWriter(run, "rank-0")
    launcher.write("start", attempt=1)
    rank.write("checkpoint", step=10)
    launcher.write("finish")
    assert launcher.close() == rank.close() == []
    events = read_events(run)
    assert sorted(event["event"] for event in events) == ["checkpoint", "finish", "start"]
    assert events == sorted(events, key=lambda event: event["time"])
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", event["time"]) for event in events)


def test_later_times_come_later_whoever_wrote_them(run):
    (run.events / "a.jsonl").write_text('{"time": "2026-01-01T00:00:02.000+00:00", "event": "second"}\n')
    (run.events / "b.jsonl").write_text(
        '{"time": "2026-01-01T00:00:01.000+00:00", "event": "first"}\n'
        '{"time": "2026-01-01T00:00:03.000+00:00", "event": "third"}\n'
    )
    assert [event["event"] for event in read_events(run)] == ["first", "second", "third"]


def test_messages_that_cannot_be_read_now_come_with_a_later_poll(run):
    messages, file = Messages(run, "rank-0"), run.events / "rank-0.jsonl"
    file.mkdir()  # as good an OSError as a stale handle
    assert messages.poll() == []
    file.rmdir()
    EventWriter(run, "rank-0").write("notice", message="hello")
    assert messages.poll() == ["hello"]
