"""Writer process: writes what is in a snapshot, so that the threads of training need not. No torch, no numpy.

    python -m gradus.checkpoint.writer_process DESCRIPTOR PARENT

It is told what to do in lines of JSON on stdin, and tells what became of it in lines of JSON on stdout. It lives no
longer than the process that started it: of a run's attempts only one may write.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradus.checkpoint.job import Job, Jobs
from gradus.checkpoint.report import Report
from gradus.faults.parent import end_with_parent

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Those that ask a run to stop, or come with its terminal. Whoever stops the run sees to it that it saves before.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Behind everything that trains. The kernel derives the priority at the disk from it, too.
_NICE = 5
LEAVE_SECONDS = 20.0  # for deleting what is being deleted


def serve(descriptor: int, lines: Iterable[bytes], output: int) -> None:
    """Do what is asked for until there is nobody left to ask."""
    telling = threading.Lock()

    def tell(number: int, report: Report) -> None:
        text = json.dumps({"number": number, "report": asdict(report)}).encode() + b"\n"
        with telling:
            try:
                while text:
                    text = text[os.write(output, text) :]
            except BrokenPipeError:
                os._exit(0)

    jobs = Jobs(tell)
    for line in lines:
        asked = json.loads(line)
        if asked["do"] == "save":
            _start(jobs, descriptor, asked)
        elif asked["do"] == "abandon":
            jobs.abandon(asked["number"], asked["why"])
        else:
            jobs.leave(asked["why"], LEAVE_SECONDS)
            return


def _start(jobs: Jobs, descriptor: int, asked: dict[str, Any]) -> None:
    """What to save and how lies in the memory itself, behind the bytes of the file: a pipe would be too narrow."""
    file_bytes, job_bytes = asked["file_bytes"], asked["job_bytes"]
    mapped = mmap.mmap(descriptor, file_bytes + job_bytes, prot=mmap.PROT_READ)
    job = Job.from_document(json.loads(mapped[file_bytes:]))

    def data(start: int, stop: int) -> Buffer:
        return memoryview(mapped)[start:stop]

    jobs.start(asked["number"], job, data)


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    end_with_parent(signal.SIGKILL)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)  # whoever starts this holds them back until here
    if os.getppid() != parent:  # which ended before it could be asked for
        return
    os.nice(_NICE)
    with suppress(OSError):  # where each session is a group of its own to the scheduler
        Path("/proc/self/autogroup").write_text(str(_NICE))
    output = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed
    with suppress(KeyboardInterrupt):
        serve(descriptor, sys.stdin.buffer, output)
    os._exit(0)  # at once: without anybody who asks, nothing may be committed


if __name__ == "__main__":
    main()
