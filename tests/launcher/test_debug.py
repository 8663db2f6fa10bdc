"""`--debug` is one rank in the very process of the command, where a debugger and a traceback are at home."""

from __future__ import annotations

import signal

from gradus_command import committed, status, trained, wait_until


def test_debug_trains_in_the_process_of_the_command_and_stops_on_request(gradus):
    note = gradus.folder / "pid"
    run = gradus.run("debugged")
    process = gradus.start(
        *("train", gradus.recipe(steps=200), "--debug", "--run-id", "debugged", "--json"),
        *("--set", "model.use=own.py:says", "--set", "model.text=hello"),
        NOTE_PID=str(note),
        STEP_SECONDS="0.05",
    )
    wait_until(lambda: len(trained(run)) >= 3, process)
    assert int(note.read_text()) == process.pid
    process.send_signal(signal.SIGTERM)
    done = gradus.end(process)
    assert done.code == 75, done.err
    assert done.json["state"] == "stopped"  # and what the model printed is not in the way
    assert "hello" in done.err
    assert committed(run) == [done.json["step"]]
    assert status(run)["state"] == "stopped"


def test_debug_has_the_environment_of_a_deterministic_rank(gradus):
    (gradus.folder / "shows.py").write_text(
        "import os\nfrom own import Model\n"
        "class Shows(Model):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        print('cuBLAS', os.environ.get('CUBLAS_WORKSPACE_CONFIG'))\n"
    )
    for deterministic, expected in ((True, "cuBLAS :4096:8"), (False, "cuBLAS None")):
        recipe = gradus.recipe(steps=1, deterministic=deterministic, model={"use": "shows.py:Shows"})
        done = gradus("train", recipe, "--debug", PYTHONPATH=str(gradus.folder))
        assert done.code == 0, done.err
        assert expected in done.out


def test_debug_shows_the_traceback_of_a_model_that_raises(gradus):
    done = gradus("train", gradus.recipe(), "--debug", "--run-id", "debug-raises", RAISE_ON_RANK="0")
    assert done.code == 1
    assert "Traceback (most recent call last)" in done.err
    assert "own.py" in done.err
    assert done.err.rstrip().endswith("ValueError: the cat is on the keyboard")
    assert status(gradus.run("debug-raises"))["state"] == "failed"


def test_a_model_that_cannot_be_built_leaves_no_run_that_seems_alive(gradus):
    recipe = gradus.recipe(model={"use": "own.py:broken_model", "width": 3})
    done = gradus("train", recipe, "--debug", "--run-id", "debug-broken", "--json")
    assert done.code == 2
    assert "KeyError: 'missing'" in done.json["error"]["message"]
    assert status(gradus.run("debug-broken"))["state"] == "failed"
