"""The address of this host that other hosts take, and what to do where they do not reach it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from bagua import env

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


def listen(host: str) -> socket.socket:
    """A socket that listens on ``host``, at a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind((host, 0))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def own_address() -> str:
    """The address of this host that Gloo takes, too: of IPv4, else of IPv6; that of the loopback device if none is."""
    interface = next(iter(env.gloo_interfaces()), None)
    for addresses in (_addresses_of_ipv4, _addresses_of_ipv6):
        with contextlib.suppress(OSError):
            for host in addresses(interface):
                listen(host).close()
                return host
    return LOOPBACK


def _addresses_of_ipv4(interface: str | None) -> list[str]:
    if not interface:
        return [socket.gethostbyname(socket.gethostname())]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return [socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])]


def _addresses_of_ipv6(interface: str | None) -> list[str]:
    """Those that other hosts can reach: not of the loopback device, and not of one link only."""
    if interface:
        lines = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
        found = [ipaddress.IPv6Address(int(line[0], 16)) for line in lines if line[5] == interface]
    else:
        answers = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET6, socket.SOCK_STREAM)
        found = [ipaddress.IPv6Address(str(answer[4][0]).partition("%")[0]) for answer in answers]
    return [str(one) for one in found if not (one.is_loopback or one.is_link_local)]


def advice_on_interfaces() -> str:
    """What to do where hosts do not reach each other through Gloo."""
    names = ", ".join(name for _, name in socket.if_nameindex())
    return f"Set GLOO_SOCKET_IFNAME to the network interface over which the hosts reach each other. Here are {names}."
