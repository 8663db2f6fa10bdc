import os
import subprocess
import sys

from gradus.record.process import environment_of, process_of, processes


def test_a_process_is_known_by_its_parent_whatever_its_name():
    name = "a) Z 1 (b"  # as the kernel writes names: in brackets, with anything in them
    code = f"open('/proc/self/comm', 'w').write({name!r}); print(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "MARK": "a=b"}
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    found = process_of(child.pid)
    assert found is not None
    assert (found.parent, found.has_ended) == (os.getpid(), False)
    assert found.pid in [process.pid for process in processes()]
    assert environment_of(child.pid)["MARK"] == "a=b"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
    found = process_of(child.pid)
    assert found is not None
    assert found.has_ended
    assert child.pid not in [process.pid for process in processes()]
    child.wait()
    assert process_of(child.pid) is None
    assert environment_of(child.pid) == {}
    child.stdin.close()
    child.stdout.close()
