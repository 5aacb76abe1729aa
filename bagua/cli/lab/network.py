"""Several hosts on one Linux machine: network namespaces, joined by a bridge over links of a given rate.

The namespaces have no names. They live as long as somebody holds them open: this process, through descriptors, and
the ranks inside. So they are unique to the process, and nothing is left of them when it ends, however it ends.

Each host has one interface, ``lab0``, whose other end is a port of a bridge in a namespace of its own. Both ends are
limited to the rate, the host's for what it sends and the port for what it receives, like a full-duplex network card.
Where links have delay or loss, ``lab0`` is a TAP device and a process of ours takes the place of the bridge.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bagua.cli.lab.switch import SwitchReport
from bagua.link import LinkSettings

INTERFACE = "lab0"
MTU_BYTES = 1500
MOST_HOSTS = 250
#: What may leave at once: a millisecond's worth, but never less than two of the largest packets the kernel makes.
BURST_S = 1e-3
LEAST_BURST_BYTES = 128 * 1024
#: How long a packet may queue before it is dropped, or a round trip, if that takes longer: less than that leaves a link
#: idle when TCP has halved its window.
LONGEST_QUEUE_MS = 50.0
CLONE_NEWNET = 0x40000000
#: Of Linux, to make a TAP device whose frames begin with the header of virtio_net.
TUNSETIFF, IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x400454CA, 0x0002, 0x1000, 0x4000
#: With it, the device takes and gives packets of TCP before they are cut into frames, and without their checksums.
TUNSETOFFLOAD, TUN_F_CSUM, TUN_F_TSO4 = 0x400454D0, 0x01, 0x02
SWITCH_ENDS_S = 5.0
#: Of the current namespace. A new one has what the machine has, and results would differ from machine to machine.
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
#: The default of Linux; and, behind the switch, what does not take it for congestion that a busy process is late.
OF_LINUX, BEHIND_SWITCH = "cubic", "bbr"


class LabUnavailableError(RuntimeError):
    """This machine, or this user, cannot have a network lab; the message says what is missing."""


@dataclass(frozen=True)
class Host:
    """One host of a network, as another process needs to know it.

    Args:
        number: from 0.
        address: address of its interface.
        namespace: a path that opens its network namespace while the lab exists.
    """

    number: int
    address: str
    namespace: str


@dataclass(frozen=True)
class Network:
    """Hosts that can reach each other.

    Args:
        hosts: the hosts, in order of their numbers.
        switch: a path that opens the namespace of the bridge.
        shortcoming: a sentence on what is not as it should be here, to be said beside figures; empty if nothing is.
    """

    hosts: tuple[Host, ...]
    switch: str
    shortcoming: str = ""

    def set_rates(self, link: LinkSettings) -> None:
        """Limit what every host sends and what it receives, on a network without delay and loss.

        Args:
            link: link of each host, whose rates count; None takes a limit away.

        Raises:
            LabUnavailableError: the kernel refuses; it may lack the token bucket filter.
        """
        for host in self.hosts:
            with inside(host.namespace):
                limit(INTERFACE, link.send_mbit_s)
            with inside(self.switch):
                limit(port_of(host), link.receive_mbit_s)

    def cut(self, number: int) -> None:
        """Let nothing pass to or from a host, without a word to those who talk with it. Not with delay or loss."""
        with inside(self.switch):
            run(f"ip link set {port_of(self.hosts[number])} nomaster")

    def mend(self, number: int) -> None:
        """Undo ``cut``."""
        with inside(self.switch):
            run(f"ip link set {port_of(self.hosts[number])} master bridge")


def refusal() -> str | None:
    """Why there cannot be a network lab here, and what would help; None where it can be."""
    if not hasattr(os, "geteuid"):
        return "the network lab needs Linux"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"the network lab needs the command {' and '.join(missing)}; Debian's package iproute2 has it"
    try:
        os.close(new_namespace())
    except OSError as error:
        return (
            "the network lab makes network namespaces and needs root for it "
            f"(CAP_SYS_ADMIN and CAP_NET_ADMIN; in a container: --privileged): {error.strerror}"
        )
    return None


@contextlib.contextmanager
def open_network(
    hosts: int, link: LinkSettings | None = None, on_report: Callable[[SwitchReport], object] = lambda _: None
) -> Iterator[Network]:
    """Build a network, and take it down at the end of the block.

    Args:
        hosts: how many, at most ``MOST_HOSTS``.
        link: link of each host; None for no limit.
        on_report: told what the switch has done, where links have delay or loss.

    Raises:
        LabUnavailableError: this cannot be done here.
    """
    link = link or LinkSettings()
    if hosts > MOST_HOSTS:
        raise LabUnavailableError(f"a lab has at most {MOST_HOSTS} hosts, each with an address of its own, not {hosts}")
    if (reason := refusal()) is not None:
        raise LabUnavailableError(reason)
    with contextlib.ExitStack() as descriptors:
        namespaces = []
        for _ in range(hosts + 1):
            descriptor = new_namespace()
            descriptors.callback(os.close, descriptor)
            namespaces.append(f"/proc/{os.getpid()}/fd/{descriptor}")
        switch, *others = namespaces
        network = Network(tuple(Host(n, f"10.77.0.{n + 1}", path) for n, path in enumerate(others)), switch)
        if link.needs_switch:
            descriptors.enter_context(switched(network, link, on_report))
        else:
            connect(network)
            network.set_rates(link)
        yield replace(network, shortcoming=_shortcoming(network, BEHIND_SWITCH if link.needs_switch else OF_LINUX))


def congestion_control(host: Host) -> str:
    """The name of what controls the congestion of connections from ``host`` to others of its network."""
    with inside(host.namespace):
        routes = subprocess.check_output(["ip", "route", "show", "dev", INTERFACE], text=True).split()
        if "congctl" in routes:
            return routes[routes.index("congctl") + 1]
        return CONGESTION_CONTROL.read_text().strip()


def _shortcoming(network: Network, wanted: str) -> str:
    found = congestion_control(network.hosts[0])
    return "" if found == wanted else f"TCP controls congestion with {found}, because this kernel refuses {wanted}"


@contextlib.contextmanager
def switched(network: Network, link: LinkSettings, on_report: Callable[[SwitchReport], object]) -> Iterator[None]:
    """Join the hosts by a process that delays and drops what they send."""
    devices = [tap_of(host, link) for host in network.hosts]
    rate = link.receive_mbit_s
    settings = {
        "devices": devices,
        "hosts": len(devices),
        "delay_s": link.delay_ms / 1e3,
        "loss": link.loss,
        "receive_bytes_per_s": None if rate is None else rate * 1e6 / 8,
    }
    command = [sys.executable, "-m", "bagua.cli.lab.switch", json.dumps(settings)]
    try:
        process = subprocess.Popen(
            command, pass_fds=devices, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
    finally:
        for device in devices:
            os.close(device)
    try:
        yield
    finally:
        process.terminate()
        try:
            written, _ = process.communicate(timeout=SWITCH_ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            written, _ = process.communicate()
        if written:
            on_report(SwitchReport(**json.loads(written)))


def tap_of(host: Host, link: LinkSettings) -> int:
    """A descriptor of a new TAP device, which is the interface of ``host``, and sends as fast as ``link``."""
    with inside(host.namespace):
        try:
            device = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(
                device, TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR)
            )
            if link.loss == 0:  # Packets of TCP arrive before they are cut into frames: fewer of them to carry.
                fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
        except OSError as error:
            raise LabUnavailableError(f"delay and loss need TAP devices (/dev/net/tun): {error.strerror}") from error
        run(f"ip link set {INTERFACE} address 02:00:00:00:00:{host.number:02x}")
        set_up(host, BEHIND_SWITCH)
        limit(INTERFACE, link.send_mbit_s, max(LONGEST_QUEUE_MS, 2 * link.delay_ms))
    return device


def connect(network: Network) -> None:
    """Make the bridge, and a link from each host to it."""
    with inside(network.switch):
        run("ip link add bridge type bridge mcast_snooping 0")
        run("ip link set bridge addrgenmode none up")
        for host in network.hosts:
            port = port_of(host)
            run(f"ip link add {port} mtu {MTU_BYTES} type veth peer name {INTERFACE} netns {host.namespace}")
            run(f"ip link set {port} master bridge addrgenmode none up")
    for host in network.hosts:
        with inside(host.namespace):
            set_up(host, OF_LINUX)


def set_up(host: Host, control: str) -> None:
    """Give the interface of ``host``, whose namespace this thread is in, its address, and choose how TCP behaves."""
    run("ip link set lo up")
    run(f"ip link set {INTERFACE} mtu {MTU_BYTES} addrgenmode none up")
    run(f"ip address add {host.address}/24 dev {INTERFACE}")
    try:
        CONGESTION_CONTROL.write_text(control)
    except OSError:  # New namespaces may not be allowed what the machine has; a route may be.
        with contextlib.suppress(LabUnavailableError):
            run(f"ip route replace 10.77.0.0/24 dev {INTERFACE} src {host.address} congctl {control}")


def port_of(host: Host) -> str:
    """The bridge's end of the link to ``host``."""
    return f"port{host.number}"


def limit(interface: str, rate_mbit_s: float | None, longest_queue_ms: float = LONGEST_QUEUE_MS) -> None:
    """Set or remove the rate at which ``interface`` of the current namespace sends."""
    if rate_mbit_s is None:  # and maybe there is none
        subprocess.run(["tc", "qdisc", "del", "dev", interface, "root"], check=False, capture_output=True)
        return
    bits_per_s = round(rate_mbit_s * 1e6)
    run(
        f"tc qdisc replace dev {interface} root tbf rate {bits_per_s}bit burst {burst_bytes(rate_mbit_s)} "
        f"latency {longest_queue_ms:g}ms"
    )


def burst_bytes(rate_mbit_s: float) -> int:
    """What may leave a link of this rate at once, after it was idle."""
    return max(LEAST_BURST_BYTES, round(rate_mbit_s * 1e6 / 8 * BURST_S))


def run(command: str) -> None:
    """Run a command of iproute2 in the current namespace."""
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    if done.returncode:
        raise LabUnavailableError(f"{command}: {done.stderr.strip() or done.stdout.strip()}")


def new_namespace() -> int:
    """A descriptor of a new network namespace; this thread stays where it is."""
    with _coming_back():
        call_kernel("unshare", CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


@contextlib.contextmanager
def _coming_back() -> Iterator[None]:
    """Bring this thread back to its namespace at the end of the block."""
    with Path("/proc/thread-self/ns/net").open("rb") as before:
        try:
            yield
        finally:
            call_kernel("setns", before.fileno(), CLONE_NEWNET)


def enter(namespace: str) -> None:
    """Move the calling thread, and all threads and processes that it will start, into a namespace for good."""
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        call_kernel("setns", descriptor, CLONE_NEWNET)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Be in a namespace until the end of the block, with this thread and with what it starts."""
    with _coming_back():
        enter(namespace)
        yield


def call_kernel(function: str, *arguments: int) -> None:
    """Call a function of the C library that Python has only since 3.12."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), function)


def sent_bytes() -> int:
    """What the calling thread's host has sent so far, headers included, as its interface counts it."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise LabUnavailableError(f"this thread is on no host of a lab: it has no interface {INTERFACE}")
