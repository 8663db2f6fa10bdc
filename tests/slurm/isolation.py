"""What a lab asks of the kernel, so that it is whole, alone, and gone when it ends."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, IFF_UP = 0x8913, 0x8914, 0x8916, 1  # linux/sockios.h, linux/if.h
CLONE_NEWNS, CLONE_NEWCGROUP = 0x00020000, 0x02000000  # linux/sched.h
MS_REC, MS_PRIVATE, MNT_DETACH = 0x4000, 0x40000, 2  # linux/mount.h, umount2(2)
LEAVING_SECONDS = 10.0
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, not of process 1."""
    _done(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1), "become a child subreaper")


def die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class LoopbackAddress:
    """A second address of the loopback, where no interface has any but 127.0.0.1.

    Slurm resolves even "127.0.0.1" with AI_ADDRCONFIG (getaddrinfo(3)), which fails there.
    """

    def __init__(self) -> None:
        self._alias: str | None = None
        try:
            socket.getaddrinfo("127.0.0.1", 1, socket.AF_INET, flags=socket.AI_ADDRCONFIG)
        except socket.gaierror:
            number = os.getpid()  # another lab has another one
            address = bytes([127, 1 + (number >> 16) % 254, (number >> 8) % 256, 1 + number % 254])
            self._alias = f"lo:{number}"
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
                request = struct.pack("16sHH4s8x", self._alias.encode(), socket.AF_INET, 0, address)
                fcntl.ioctl(control, SIOCSIFADDR, request)

    def remove(self) -> None:
        if self._alias:
            interface_up(self._alias, up=False)  # an alias that goes down is gone


def interface_up(name: str, up: bool = True) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        (flags,) = struct.unpack("16xh", fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16sh", name.encode(), 0)))
        flags = flags | IFF_UP if up else flags & ~IFF_UP
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh", name.encode(), flags))


class Freezer:
    """A freezer hierarchy (cgroups, version 1) that begins at this process: all that proctrack/cgroup needs.

    The first version, because its freezer can be had by root whichever version a machine otherwise uses. In a
    namespace of its own, because Slurm calls a node's cgroup slurm_<node>, in every lab. Only this process and those
    that it starts see the mounts, which lie below `folder`.
    """

    def __init__(self, folder: Path) -> None:
        self.all, self.own = folder / "cgroup-all" / "freezer", folder / "cgroup" / "freezer"
        _done(_libc.unshare(CLONE_NEWNS), "make a mount namespace")
        _done(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "keep mounts private")
        self._mount(self.all)
        self._group = self.all / f"gradus-lab-{os.getpid()}"
        self._group.mkdir()
        self._enter(self._group)
        _done(_libc.unshare(CLONE_NEWCGROUP), "make a cgroup namespace")
        self._mount(self.own)

    def _mount(self, where: Path) -> None:
        where.mkdir(parents=True)
        _done(_libc.mount(b"cgroup", str(where).encode(), b"cgroup", 0, b"freezer"), "mount a freezer hierarchy")

    def _enter(self, group: Path) -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Once all other processes in it have ended."""
        self._enter(self.all)
        for group, _, _ in os.walk(self._group, topdown=False):
            _remove(group)
        for where in (self.own, self.all):
            _done(_libc.umount2(str(where).encode(), MNT_DETACH), "unmount a freezer hierarchy")


def _remove(group: str) -> None:
    """A process that was killed is in its group until its last thread has gone."""
    until = time.monotonic() + LEAVING_SECONDS
    while True:
        try:
            os.rmdir(group)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            return


def _done(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"this machine does not let a lab {what}: {os.strerror(number)}")
