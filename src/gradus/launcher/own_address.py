"""This machine's own address: where other nodes look for it, as the libraries that connect ranks do."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_SIZE_OF_IFREQ = 256


def own_address(interface: str | None = None) -> tuple[str | None, str, str | None]:
    """The address, what was asked for it, and why there is none.

    The named interface, or the one that gloo is told to use, or else what the host's own name stands for.
    """
    interface = interface or os.environ.get("GLOO_SOCKET_IFNAME")
    if interface and not interface.startswith("^"):
        named = [name.strip().lstrip("=") for name in interface.split(",")]
        there = [name for _, name in socket.if_nameindex()]
        for name in there:
            if any(name.startswith(wanted) for wanted in named):
                with contextlib.suppress(OSError):
                    return _address_of(name), f"interface {name}", None
        return None, f"interface {interface}", f"it is not there, or has no IPv4 address; there are {', '.join(there)}"
    host = socket.gethostname()
    try:
        return socket.gethostbyname(host), f"host name {host}", None
    except OSError as error:
        return None, f"host name {host}", f"it stands for no address: {error.strerror or error}"


def machine_identity() -> str:
    """Of the running kernel and its network: several nodes of a scheduler, or containers, can share one machine."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    return socket.gethostname()


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack(f"{_SIZE_OF_IFREQ}s", interface[:15].encode())
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
