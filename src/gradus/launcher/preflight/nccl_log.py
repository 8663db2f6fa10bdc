"""NCCL's own log (NCCL_DEBUG=INFO): over which network ranks of different nodes talk, and why not over a better one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

# "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA": one line for each direction of each channel. Before
# NCCL 2.8, they begin with "Ring 00".
_CHANNEL = re.compile(r"(?:Channel|Ring) \d+(?:/\d+)?\s*:.*\bvia (?P<way>[A-Za-z0-9]+(?:/[A-Za-z ]+)?)")
# "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB ib0:10.1.2.3<0>", "NET/Socket : Using [0]eth0:10.0.0.1<0>".
# Old releases name the sockets first, for their own messages, and then what carries data: the last one counts.
_USING = re.compile(r"NET/(?P<net>\w+)\s*:\s*Using (?P<devices>\[\d+\].*)")
_NETWORK = re.compile(r"Using network (?P<name>[\w ]+?)\s*$")
_WHY_NOT = re.compile(
    r"NET/(?:IB|OFI|Plugin)\b.*?(?:No device found|No plugin found|[Ff]ailed|[Uu]nable|[Cc]ould not).*"
)
_SOCKETS = "Socket"


@dataclass(frozen=True)
class NcclTransport:
    """What a log says of the ways between ranks."""

    network: str | None = None  # "IB", "Socket", or the name of a plugin's
    devices: tuple[str, ...] = ()
    channels: Mapping[str, int] = field(default_factory=dict)  # way -> how many channels take it
    reasons: tuple[str, ...] = ()  # what it says about networks that it does not use

    @property
    def over_sockets(self) -> bool:
        """Whether data between nodes goes through the kernel's TCP."""
        ways = {way for way in self.channels if way.startswith("NET/")}
        return ways == {f"NET/{_SOCKETS}"} if ways else self.network == _SOCKETS


def read_nccl_log(text: str) -> NcclTransport:
    network: str | None = None
    devices: tuple[str, ...] = ()
    reasons: list[str] = []
    channels: Counter[str] = Counter()
    for line in text.splitlines():
        _, found, said = line.partition("NCCL ")
        if not found:
            continue
        if channel := _CHANNEL.search(said):
            channels[channel["way"].strip()] += 1
        elif using := _USING.search(said):
            network, devices = using["net"], _devices(using["devices"])
        elif chosen := _NETWORK.search(said):
            network = chosen["name"]
        elif why := _WHY_NOT.search(said):
            reasons.append(why[0].strip())
    return NcclTransport(network, devices, dict(channels), tuple(dict.fromkeys(reasons)))


def _devices(text: str) -> tuple[str, ...]:
    """The names in `[0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB ...`."""
    return tuple(re.findall(r"\[\d+\]([^\s;]+)", text.partition("; OOB")[0]))
