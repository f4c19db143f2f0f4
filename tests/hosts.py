"""Hosts that are apart: network namespaces of one machine, with own addresses and host names, joined by a relay.

The relay passes the packets of the hosts' TUN devices on, after a delay; it can lose some and cut a host off. It needs
root, iproute2, util-linux and /dev/net/tun, and leaves nothing behind. MPICH starts its processes by `-launcher-exec`.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import launch

_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_ENTER = """#!/bin/sh
# What MPICH calls instead of ssh: options, a host, a command.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; exec sh -c "$1"' "$host" "$*"
"""


def missing() -> str:
    """Return why hosts can't be made here, or an empty string."""
    if os.geteuid():
        return "needs root"
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"needs {program}"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"needs /dev/net/tun ({error.strerror})"
    done = subprocess.run(["ip", "netns", "add", f"mpiad{os.getpid()}"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", f"mpiad{os.getpid()}"], capture_output=True)
    return done.stderr.strip()


class Relay(threading.Thread):
    """Passes packets between devices: `delay` of one way in seconds, `loss` a fraction, `cut` the hosts without network."""

    def __init__(self, devices: Sequence[int], delay: float, loss: float):
        super().__init__(daemon=True)
        self.devices, self.delay, self.loss, self.cut, self.ended = devices, delay, loss, set[int](), False

    def run(self) -> None:
        waiting, number, rng = [], 0, random.Random(1)
        while not self.ended:
            rest = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else 0.1
            for device in select.select(self.devices, [], [], min(rest, 0.1))[0]:
                packet = os.read(device, 65536)
                if packet[0] >> 4 != 4 or not 1 <= packet[19] <= len(self.devices):
                    continue  # neither IPv4 nor to a host
                source, dest = self.devices.index(device), packet[19] - 1
                if not {source, dest} & self.cut and rng.random() >= self.loss:
                    number += 1
                    heapq.heappush(waiting, (time.monotonic() + self.delay, number, self.devices[dest], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):
                    os.write(*heapq.heappop(waiting)[2:])


class Hosts:
    """Some hosts; `names` are their host names."""

    def __init__(self, count: int, folder: Path, delay: float = 0.0, loss: float = 0.0):
        self.names = [f"mpiad{os.getpid()}h{k}" for k in range(count)]
        self.relay = Relay([self._device(k) for k in range(count)], delay, loss)
        self._enter = folder / "enter"
        self._enter.write_text(_ENTER)
        self._enter.chmod(0o755)

    def _device(self, k: int) -> int:
        device, name = os.open("/dev/net/tun", os.O_RDWR), f"mpiad{os.getpid() % 100000}t{k}"
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _TUN_WITHOUT_HEADER))
        host, addresses = self.names[k], Path("/etc/netns") / self.names[k]
        addresses.mkdir(parents=True)
        lines = [f"10.77.0.{j + 1} {other}" for j, other in enumerate(self.names)]
        (addresses / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for command in (
            f"netns add {host}",
            f"link set {name} netns {host}",
            f"-n {host} link set {name} name net0 mtu 9000",
            f"-n {host} addr add 10.77.0.{k + 1}/24 dev net0",
            f"-n {host} link set net0 up",
            f"-n {host} link set lo up",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        return device

    def close(self) -> None:
        """Remove the hosts."""
        self.relay.ended = True
        if self.relay.is_alive():
            self.relay.join()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        for device in self.relay.devices:
            os.close(device)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()

    def start(self, per_host: int, *command: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a program with so many ranks on each host."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(launch.OF_THE_LAUNCHER)}
        environment |= {"FI_PROVIDER": "tcp", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "net0", **(env or {})}
        first, count = self.names[0], str(per_host * len(self.names))
        mpiexec = [launch.find_mpiexec(), "-launcher", "ssh", "-launcher-exec", self._enter, "-hosts", ",".join(self.names)]
        arguments = [*mpiexec, "-ppn", str(per_host), "-n", count, *command]
        enter = ["ip", "netns", "exec", first, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', first]
        return subprocess.Popen(
            [*enter, *map(str, arguments)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip


@contextlib.contextmanager
def hosts(count: int, folder: Path, delay: float = 0.0, loss: float = 0.0) -> Iterator[Hosts]:
    """Hosts for the time of a block."""
    found = Hosts(count, folder, delay, loss)
    found.relay.start()
    try:
        yield found
    finally:
        found.close()
