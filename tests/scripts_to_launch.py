"""Small scripts that behave in one way each, for tests of launching: most need no torch and so start at once."""

from __future__ import annotations

import os
from pathlib import Path

from gradus.launcher.processes import attempt_processes

PRINTS = """
import os, sys
rank = os.environ["RANK"]
print("out of", rank, os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], *sys.argv[1:])
print("err of", rank, file=sys.stderr)
for percent in (10, 50, 100):
    sys.stderr.write(f"\\r{percent}%")
sys.stderr.write("\\n")
print("threads", *(os.environ[name] for name in ("OMP_NUM_THREADS", "GRADUS_RUN", "GRADUS_ATTEMPT")))
"""

# Rank 1 fails as its argument says; rank 0 would go on for ever.
FAILS = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    time.sleep(600)
print("about to fail")
how = sys.argv[1]
if how == "raise":
    raise ValueError("the cat is on the keyboard")
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "breakpoint":
    breakpoint()
    print("never")
if how == "usage":
    print("usage: fails.py [-h]\\nfails.py: error: unrecognized arguments: --foo", file=sys.stderr)
    sys.exit(2)
sys.exit(int(how))
"""

# Rank 1 fails in the middle of training, and rank 0 only loses its peer.
LOSES_PEER = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(1000):
    if step == 5 and dist.get_rank() == 1:
        raise ValueError("the cat is on the keyboard")
    model(torch.rand(8, 4)).sum().backward()
"""

# Notes that it is ready and how it was told to stop. SLOW: seconds that a rank takes for its end after that.
WAITS = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder, how = Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
told = []
if how != "plain":
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
if how == "children":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / f"ready-{rank}").touch()
while not told or how in ("ignores", "children"):
    time.sleep(0.05)
time.sleep(float(os.environ.get("SLOW", "0")))
(folder / f"saved-{rank}").write_text(str(len(told)))
sys.exit(int(how) if how.isdigit() else 0)
"""

# What a loop of its own does for its launcher, without torch: a mark, a heartbeat, metrics, an outcome.
OWN_LOOP = """
import os, sys, time
from pathlib import Path
from gradus.record.append_log import AppendLog
from gradus.record.directory import RunDirectory
from gradus.record.outcome import write_outcome
from gradus.record.status import Heartbeat, Status
run, attempt = RunDirectory(Path(os.environ["GRADUS_RUN"])), int(os.environ["GRADUS_ATTEMPT"])
if os.environ["RANK"] == "0":
    (run.control / f"own-loop-{attempt}").touch()
    heartbeat = Heartbeat(run, Status("running", 0, 500, attempt))
    metrics = AppendLog(run.metrics_path)
    for step in range(1, 501):
        metrics.write({"step": step, "attempt": attempt, "loss": 1 / step})
        heartbeat.update(step=step)
        time.sleep(0.05)
        if run.stop_file.exists():
            break
    heartbeat.close(state="stopped")
    ending = {"state": "stopped", "exit_code": 75, "reason": "asked"}
    write_outcome(run, attempt, {**ending, "step": step, "loss": 1 / step})
else:
    while not run.outcome_path(attempt).exists():
        time.sleep(0.05)
"""

# Ranks that do not use the store of torchrun, but find each other by themselves.
MEETS_ELSEWHERE = """
import os, socket, sys, time
from pathlib import Path
port = Path(sys.argv[1])
if os.environ["RANK"] == "0":
    server = socket.create_server(("127.0.0.1", 0))
    port.with_suffix(".new").write_text(str(server.getsockname()[1]))
    port.with_suffix(".new").rename(port)
    peer, _ = server.accept()
else:
    while not port.exists():
        time.sleep(0.05)
    peer = socket.create_connection(("127.0.0.1", int(port.read_text())))
time.sleep(3)
"""

ALL = {
    "prints.py": PRINTS,
    "fails.py": FAILS,
    "loses_peer.py": LOSES_PEER,
    "waits.py": WAITS,
    "own_loop.py": OWN_LOOP,
    "meets_elsewhere.py": MEETS_ELSEWHERE,
}


def write_scripts(folder: Path) -> None:
    for name, text in ALL.items():
        (folder / name).write_text(text)


def living(run: Path, attempt: int = 1) -> list[int]:
    """The processes of an attempt that are alive, whatever they are."""
    return [pid for pid in attempt_processes(run, attempt) if pid != os.getpid()]
