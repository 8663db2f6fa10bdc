"""The place of an attempt in a job."""

from __future__ import annotations

from gradus.launcher.job_place import JOB_FILE, JobPlace, read_place


def test_a_place_comes_back_as_it_was_written_and_damage_is_no_place(run):
    place = JobPlace(7, 2, ("n1", "n2"), 1.5)
    attempt = run.new_attempt({JOB_FILE: place.to_json()})
    assert read_place(run, attempt) == place
    for text in ("{", "[]", '{"job_id": 7}', '{"job_id": 7, "nodes": [], "more": 1}'):
        (run.attempt_path(attempt) / JOB_FILE).write_text(text)
        assert read_place(run, attempt) is None
    assert read_place(run, attempt + 1) is None
