"""Machines that share this one but not its network: each has its own address, and links that can be slowed or cut.

with separate_networks(4) as networks:
    networks.slow(2, "100mbit")
    subprocess.run([*networks.inside(1), "ping", "-c1", networks.address(2)])
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

INTERFACE = "lab0"


class Networks:
    def __init__(self, count: int) -> None:
        self.key, self.count = secrets.token_hex(3), count

    def address(self, number: int) -> str:
        return f"198.18.0.{number + 1}"  # for benchmarks of networks (RFC 2544)

    def inside(self, number: int) -> list[str]:
        return ["ip", "netns", "exec", self.name(number)]

    def name(self, number: int | str) -> str:
        return f"g{self.key}-{number}"

    def slow(self, number: int, rate: str) -> None:
        """Of one machine, in both directions."""
        limit = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
        ip("netns", "exec", self.name(number), "tc", "qdisc", "add", "dev", INTERFACE, *limit)
        ip("netns", "exec", self.name("hub"), "tc", "qdisc", "add", "dev", f"p{number}", *limit)

    def cut(self, one: int, other: int) -> None:
        """Between two machines nothing arrives any more."""
        for here, there in ((one, other), (other, one)):
            ip("netns", "exec", self.name(here), "ip", "route", "add", "blackhole", f"{self.address(there)}/32")

    def _make(self) -> None:
        hub = self.name("hub")
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number in range(self.count):
            here = self.name(number)
            ip("netns", "add", here)
            ip("-n", here, "link", "add", INTERFACE, "type", "veth", "peer", "name", f"p{number}", "netns", hub)
            ip("-n", here, "addr", "add", f"{self.address(number)}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                ip("-n", here, "link", "set", interface, "up")
            ip("-n", hub, "link", "set", f"p{number}", "master", "bridge", "up")

    def _remove(self) -> None:
        for name in ("hub", *range(self.count)):
            subprocess.run(["ip", "netns", "del", self.name(name)], capture_output=True)


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@contextmanager
def separate_networks(count: int) -> Iterator[Networks]:
    networks = Networks(count)
    try:
        networks._make()
        yield networks
    finally:
        networks._remove()
