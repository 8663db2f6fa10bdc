"""A real Slurm on this machine: slurmctld, several slurmd, and a munged, all in one private folder.

    with Lab() as lab:
        lab.run("srun", "-N2", "hostname")

Several labs may be up at once: each has its own ports, key and sockets. Everything ends with the process that opened
it, also when that is killed (`supervisor.py`). `python tests/slurm/lab.py [-- COMMAND]` opens a shell in one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program: what `pythonpath` is to the tests
    sys.path[0] = str(Path(__file__).parents[1])
from slurm.configuration import Partition, Site, cluster_yaml, default_partitions, free_ports, gres_conf, slurm_conf

NEEDED = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "munged": "munge",
}
SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"  # where daemons live: not in everybody's PATH
SAVE_SECONDS = 6  # slurmctld writes its state five seconds after a change at the latest (SAVE_MAX_WAIT, state_save.c)
SOCKET_PATH_LIMIT = 107  # bytes in sockaddr_un.sun_path (unix(7)), less the ending zero
REQUEUED_WITHIN_SECONDS = 3  # a job that has ended, and was told to requeue, may be seen as ended for a moment
ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
)


class LabError(Exception):
    """The lab did not do what it was asked; the text has the last lines of its logs."""


class NoCgroups(LabError):
    """The machine does not let a lab have cgroups; the text says what it refused."""


def missing() -> str | None:
    """Why no lab can be had here, or None."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_FOLDERS}"
    packages = sorted({package for program, package in NEEDED.items() if shutil.which(program, path=path) is None})
    if packages:
        return f"a Slurm lab needs the packages {' '.join(packages)} (as root: make slurm)"
    if os.geteuid() != 0:
        return "a Slurm lab needs root: slurmd changes to the user of each job, and fake GPUs are device files"
    return None


class Lab:
    """A cluster of nodes n1, n2, ... that share this host; `with Lab() as lab:`."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        nodes: int = 4,
        cpus: int = 2,
        gpus: int = 2,
        proctrack: str = "linuxproc",
        requeue: bool = True,
        partitions: Sequence[Partition] = default_partitions(),
        accounting: str | None = None,
        settings: dict[str, str] | None = None,
    ) -> None:
        """`settings` are further lines of slurm.conf, or others in place of the lab's own; `accounting="filetxt"` makes
        `sacct -c` work."""
        self.folder = Path(folder or tempfile.mkdtemp(prefix="slurm-lab-", dir=_short_folder())).absolute()
        self.nodes = tuple(f"n{number + 1}" for number in range(nodes))
        self.site = Site(
            self.folder, self.nodes, cpus, gpus, proctrack, requeue, tuple(partitions), accounting, settings or {}
        )
        self.slurm_conf = self.folder / "etc" / "slurm.conf"
        self.cluster_file = self.folder / "cluster.yaml"
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        here = str(Path(sys.executable).parent)
        self.environment = {
            **outer,
            "PATH": f"{here}:{outer.get('PATH', os.defpath)}:{SYSTEM_FOLDERS}",
            "SLURM_CONF": str(self.slurm_conf),
        }
        self._supervisor: subprocess.Popen[str] | None = None
        self._controller_port = 0

    def __enter__(self) -> Lab:
        self.open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- life ----

    def open(self) -> None:
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        if reason := missing():
            raise LabError(reason)
        for name in ("etc", "log", "run", "state", "spool", "dev"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for node in self.nodes:
            (self.folder / "tmp" / node).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)  # munged's clients pass through it
        longest = str(self.folder / "spool" / self.nodes[-1] / f"{self.nodes[-1]}_1234567.4294967291")
        if len(longest) > SOCKET_PATH_LIMIT:
            raise LabError(f"a folder with a shorter name is needed: {longest} is a socket of Slurm, and too long")
        self._supervisor = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("supervisor.py")), str(self.folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the command in the lab, not for the lab
        )
        key = self.folder / "etc" / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        for number in range(self.site.gpus):
            os.mknod(self.folder / "dev" / f"nvidia{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null
        if self.site.proctrack == "cgroup":
            try:
                self._ask("freezer", "")
            except LabError as error:
                raise NoCgroups(f"no proctrack/cgroup here: {error}") from None
        # Also without it: slurmd would look at how this machine has cgroups, and may not like it.
        cgroups = f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self.folder}/cgroup\n"
        (self.folder / "etc" / "cgroup.conf").write_text(cgroups)
        self._start_munge()
        for tries_left in reversed(range(3)):
            try:
                self._start_slurm()
                return
            except LabError as error:  # somebody took one of the ports between the look and the bind
                if not (tries_left and "Address already in use" in str(error)):
                    raise
                self._kill_slurm()

    def _start_slurm(self) -> None:
        self._configure()
        self.start_controller(wait=False)
        for node in self.nodes:
            self.start_node(node, wait=False)
        self._until(self._all_idle, 60, "not all nodes became idle", needed=("slurmctld", *self.nodes))

    def _controller_listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._controller_port)) == 0

    def _kill_slurm(self) -> None:
        for name in ("slurmctld", *self.nodes):
            self._ask("kill", name)
        for log in (self.folder / "log").glob("*"):
            log.unlink()

    def close(self) -> None:
        if self._supervisor is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        self._supervisor.wait(60)
        self._supervisor = None

    def _ask(self, do: str, name: str, **more: object) -> dict[str, Any]:
        assert self._supervisor is not None
        assert self._supervisor.stdin is not None
        assert self._supervisor.stdout is not None
        self._supervisor.stdin.write(json.dumps({"do": do, "name": name, **more}) + "\n")
        self._supervisor.stdin.flush()
        line = self._supervisor.stdout.readline()
        if not line:
            raise LabError("the lab's supervisor has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LabError(answer["error"])
        return answer

    def _start(self, name: str, *command: str) -> None:
        self._ask("start", name, command=command, environment=self.environment)

    def _alive(self, name: str) -> bool:
        return self._ask("code", name)["code"] is None

    # ---- configuration ----

    def _start_munge(self) -> None:
        self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",  # a folder below /tmp is writable by others; ours is not
            f"--socket={self.folder}/run/munge.socket",
            f"--key-file={self.folder}/etc/munge.key",
            f"--pid-file={self.folder}/run/munged.pid",
            f"--log-file={self.folder}/log/munged.log",
            f"--seed-file={self.folder}/run/munged.seed",
            "--origin=127.0.0.1",
        )
        made = (self.folder / "run" / "munge.socket").exists
        self._until(made, 10, "munged made no socket", needed=("munged",))

    def _configure(self) -> None:
        ports = free_ports(1 + len(self.nodes))
        self._controller_port = ports[0]
        self.slurm_conf.write_text(slurm_conf(self.site, ports))
        (self.folder / "etc" / "gres.conf").write_text(gres_conf(self.site))
        self.cluster_file.write_text(cluster_yaml(self.site))

    # ---- daemons ----

    def start_controller(self, wait: bool = True) -> None:
        self._start("slurmctld", "slurmctld", "-D", "-i", "-f", str(self.slurm_conf))
        if wait:
            self._until(self._controller_answers, 30, "slurmctld does not answer", needed=("slurmctld",))

    def kill_controller(self, saved: bool = True) -> None:
        """SIGKILL: jobs go on without it. With `saved`, once it has written down what it knows: it may take
        SAVE_SECONDS for that, and a younger job would be gone for good, here as at any site."""
        if saved:
            time.sleep(SAVE_SECONDS)
        self._ask("kill", "slurmctld")

    def start_node(self, name: str, wait: bool = True) -> None:
        assert name in self.nodes, f"no node {name}: {', '.join(self.nodes)}"
        self._start(name, "slurmd", "-D", "-N", name, "-f", str(self.slurm_conf))
        if wait:
            up = ("idle", "mixed", "allocated")
            self._until(lambda: self.node_states()[name] in up, 60, f"{name} is not back", needed=(name,))

    def kill_node(self, name: str) -> None:
        """What a power cut does: SIGKILL of the node's slurmd, of its steps, and of all that these run."""
        assert name in self.nodes, f"no node {name}: {', '.join(self.nodes)}"
        self._ask("kill", name)

    def _controller_answers(self) -> bool:
        return "UP" in self._try("scontrol", "ping")

    # ---- use ----

    def run(self, *command: str, check: bool = True, timeout: float = 60, **keywords: Any) -> str:
        """The standard output of a command that talks to this lab; what went wrong is in the exception."""
        environment = {**self.environment, **keywords.pop("env", {})}
        done = subprocess.run(
            command, env=environment, text=True, capture_output=True, timeout=timeout, check=False, **keywords
        )
        if check and done.returncode != 0:
            raise LabError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def _try(self, *command: str) -> str:
        try:
            return self.run(*command, check=False, timeout=15)
        except subprocess.TimeoutExpired:
            return ""

    def sbatch(self, *options: str, wrap: str, env: dict[str, str] | None = None) -> str:
        """Submit a line of shell; the job's id."""
        output = () if any(option.startswith(("-o", "--output")) for option in options) else ("--output=/dev/null",)
        return self.run(
            "sbatch", "--parsable", *output, *options, f"--wrap={wrap}", cwd=self.folder, env=env or {}
        ).strip()

    def job(self, job_id: str | int) -> dict[str, str]:
        """What `scontrol show job` says about a job, by its names."""
        return parsed(self.run("scontrol", "show", "job", "-o", str(job_id)))

    def node_states(self) -> dict[str, str]:
        """`idle`, `allocated`, `mixed`, `down`, `drained`, ...; an ending `*`: does not answer."""
        lines = self._try("sinfo", "-h", "-N", "-p", self.site.partitions[0].name, "-o", "%N %T").splitlines()
        return dict.fromkeys(self.nodes, "unknown") | dict(line.split() for line in lines)

    def wait_for_state(self, job_id: str | int, states: str | Collection[str], timeout: float = 60) -> dict[str, str]:
        """Until the job is in one of these states: what `job` says then. An error if it has ended otherwise."""
        wanted = {states} if isinstance(states, str) else set(states)
        end, ended_at = time.monotonic() + timeout, None
        while True:
            text = self._try("scontrol", "show", "job", "-o", str(job_id))
            job = parsed(text) if "JobState=" in text else {}  # nothing: the controller is away
            state = job.get("JobState", "unknown")
            if state in wanted:
                return job
            ended_at = (ended_at or time.monotonic()) if state in ENDED else None
            if ended_at and time.monotonic() > ended_at + REQUEUED_WITHIN_SECONDS:
                raise LabError(f"job {job_id} is {state}, and not {' or '.join(sorted(wanted))}: {job}")
            if time.monotonic() > end:
                raise LabError(f"job {job_id} is {state} after {timeout} s: {job}\n{self.logs()}")
            time.sleep(0.2)

    def _all_idle(self) -> bool:
        # Slurm's commands wait long for a controller that does not listen.
        return self._controller_listens() and set(self.node_states().values()) == {"idle"}

    def wait_until_idle(self, timeout: float = 60) -> None:
        self._until(self._all_idle, timeout, "not all nodes became idle")

    def clear(self) -> None:
        """As it was at the start: no jobs, no reservations, every daemon up, every node idle."""
        if not self._alive("slurmctld"):
            self.start_controller()
        for node in self.nodes:
            if not self._alive(node):
                self.start_node(node, wait=False)
        for reservation in re.findall(r"ReservationName=(\S+)", self._try("scontrol", "show", "reservation", "-o")):
            self.run("scontrol", "delete", f"ReservationName={reservation}")
        if ids := self.run("squeue", "-h", "-r", "-o", "%i").split():
            self.run("scancel", *ids, check=False)
        for node, state in self.node_states().items():
            if state.startswith("drain"):
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        try:
            self.wait_until_idle(15)
        except LabError:  # a process that detached itself keeps a node busy for a minute: no test need wait for that
            for node, state in self.node_states().items():
                if state != "idle":
                    self.kill_node(node)
                    self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=cleared")
                    self.start_node(node, wait=False)
                    self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
            self.wait_until_idle(60)

    def logs(self, lines: int = 15) -> str:
        """The ends of all daemons' logs."""
        texts = []
        for path in sorted((self.folder / "log").glob("*")):
            if path.stat().st_size:
                end = path.read_text(errors="replace").splitlines()[-lines:]
                texts.append(f"--- {path.name}\n" + "\n".join(end))
        return "\n".join(texts)

    def _until(self, condition: Callable[[], bool], timeout: float, failure: str, needed: Sequence[str] = ()) -> None:
        """Waits for the condition, as long as the daemons that it needs live."""
        end = time.monotonic() + timeout
        while True:
            if ended := [name for name in needed if not self._alive(name)]:
                raise LabError(f"{' and '.join(ended)} ended at once:\n{self.logs()}")
            if condition():
                return
            if time.monotonic() > end:
                raise LabError(f"{failure} within {timeout} s; nodes: {self._try('sinfo', '-N', '-l')}\n{self.logs()}")
            time.sleep(0.05)


def parsed(line: str) -> dict[str, str]:
    """`Name=value Other=value with spaces` as scontrol prints it with -o."""
    parts = re.split(r"(?:^|\s)([A-Z][A-Za-z:/_]*)=", line.strip())
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _short_folder() -> str:
    """For temporary files; some systems have one whose name is too long for sockets in it."""
    return folder if len(folder := tempfile.gettempdir()) < SOCKET_PATH_LIMIT // 3 else "/tmp"


WELCOME = """\
Slurm with {nodes} nodes and {gpus} GPUs each (in name only). It ends with this shell: leave it with `exit`.

  sinfo                                   its partitions: main, low (may be preempted), high (preempts)
  srun -N2 --gres=gpu:2 env | grep CUDA   two nodes, two GPUs each
  sbatch -N2 --wrap 'srun hostname'       a batch job; squeue shows it
  gradus submit RECIPE --cluster {cluster}
  ls {folder}/log    what the daemons say
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Open a shell, or run a command, in a Slurm cluster of its own.")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--proctrack", choices=["linuxproc", "cgroup"], default="linuxproc")
    parser.add_argument("--no-requeue", action="store_true", help="as at a site that does not requeue jobs")
    parser.add_argument("command", nargs="*", metavar="-- COMMAND")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lab = Lab(
        nodes=given.nodes, cpus=given.cpus, gpus=given.gpus, proctrack=given.proctrack, requeue=not given.no_requeue
    )
    try:
        with lab:
            environment = {**lab.environment, "LAB": str(lab.folder), "LAB_CLUSTER": str(lab.cluster_file)}
            if not given.command:
                print(WELCOME.format(nodes=given.nodes, gpus=given.gpus, cluster=lab.cluster_file, folder=lab.folder))
            return subprocess.run(given.command or [os.environ.get("SHELL", "sh")], env=environment).returncode
    except LabError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
