"""Events of all writers are followed, also of those that come later."""

from gradus.record.event_tails import EventTails
from gradus.record.events import EventWriter


def test_each_event_comes_once_also_of_writers_that_come_later(run):
    tails = EventTails(run)
    assert tails.poll() == []
    first = EventWriter(run, "rank-0-attempt-1")
    first.write("start")
    assert [event["event"] for event in tails.poll()] == ["start"]
    EventWriter(run, "launcher-attempt-1").write("launch")
    first.write("checkpoint")
    assert {event["event"] for event in tails.poll()} == {"launch", "checkpoint"}
    assert tails.poll() == []


def test_half_a_line_comes_when_it_is_whole(run):
    tails, file = EventTails(run), run.events / "rank-0-attempt-1.jsonl"
    file.write_text('{"time": "1", "event": "sta')
    assert tails.poll() == []
    with file.open("a") as more:
        more.write('rt"}\nnonsense\n')
    assert [event["event"] for event in tails.poll()] == ["start"]


def test_a_run_without_the_folder_has_no_events_yet(run):
    run.events.rmdir()
    assert EventTails(run).poll() == []
