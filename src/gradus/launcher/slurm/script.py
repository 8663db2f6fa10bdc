"""The batch script: one readable file, in which nothing that a user wrote can become a command."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from importlib import resources

import jinja2

import gradus
from gradus.schema.cluster import Network

# For both: between nodes NCCL carries tensors on GPUs, and gloo what is in host memory.
_INTERFACE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
# Runs a command that ignores, from its first moment on, what is sent to all processes of a job to stop it.
IGNORING = ("bash", "-c", 'trap "" TERM USR1; exec "$@"')


@dataclass(frozen=True)
class ScriptInputs:
    """What a batch script is made of. Paths are absolute; everything but `environment` and `python` gets quoted."""

    title: str
    runs: tuple[str, ...]  # several: those of an array job, by the number of its task
    header: tuple[str, ...]  # sbatch options, one for each line
    python: str  # as a word of the shell
    srun_options: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()  # lines of the shell
    variables: tuple[tuple[str, str], ...] = ()
    prefix: tuple[str, ...] = ()  # before each node's command: of a container
    ranks_by_mpi: tuple[str, ...] = ()  # the command that starts ranks without torchrun
    lead_seconds: int = 120
    preflight: bool = False


def render(inputs: ScriptInputs) -> str:
    """The script, byte for byte what is submitted."""
    template = resources.files("gradus.launcher.slurm").joinpath("script.sh.j2").read_text()
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["quote"] = shlex.quote
    title = " ".join(inputs.title.split())  # a comment ends with its line
    return environment.from_string(template).render({**vars(inputs), "title": title, "version": gradus.__version__})


def node_tasks(nodes: int) -> list[str]:
    """srun's options for one task on each node, which outlives a task that fails: the nodes end each other in order."""
    return [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0"]


def network_variables(network: Network) -> tuple[tuple[str, str], ...]:
    """What the cluster file says about the network, and nothing else: a guess is worse than the library's own."""
    interface = [(name, network.interface) for name in _INTERFACE] if network.interface else []
    return (*interface, *network.variables.items())
