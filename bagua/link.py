"""What hosts and their links are like, in words and numbers."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_BIT_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_MOST_DELAY_MS = 60_000.0


@dataclass(frozen=True)
class LinkSettings:
    """The link between a host and the switch.

    Attributes:
        receive_mbit_s: highest rate at which the host receives, in 10^6 bits per second; None for no limit.
        send_mbit_s: highest rate at which it sends.
        delay_ms: between two hosts, one way.
        loss: the share of packets between two hosts that never arrive, from 0 to 1.
    """

    receive_mbit_s: float | None = None
    send_mbit_s: float | None = None
    delay_ms: float = 0.0
    loss: float = 0.0

    @property
    def needs_switch(self) -> bool:
        """Whether the kernel's rate limits are not enough."""
        return self.delay_ms > 0 or self.loss > 0

    def __str__(self) -> str:
        rates = [_rate(self.receive_mbit_s), _rate(self.send_mbit_s)]
        words = [rates[0] if rates[0] == rates[1] else "/".join(rates)]
        words += [f"{self.delay_ms:g}ms"] if self.delay_ms else []
        words += [f"{100 * self.loss:g}%"] if self.loss else []
        return ",".join(words)


def _rate(mbit_s: float | None) -> str:
    return "unlimited" if mbit_s is None else f"{mbit_s:g}mbit"


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hosts_in_words(hosts: int, ranks_per_host: int) -> str:
    """How many hosts, and how many ranks on each.

    Example:
        >>> hosts_in_words(4, 1)
        '4 hosts with 1 rank each'
        >>> hosts_in_words(1, 2)
        '1 host with 2 ranks'
    """
    ranks = "1 rank" if ranks_per_host == 1 else f"{ranks_per_host} ranks"
    return f"1 host with {ranks}" if hosts == 1 else f"{hosts} hosts with {ranks} each"


def parse_link(text: str) -> LinkSettings:
    """The link that ``text`` describes: its rate, and maybe delay and loss, separated by commas.

    Args:
        text: a rate with its unit (``kbit``, ``mbit``, ``gbit``, each for a second) or ``unlimited``, two of them for
            what a host receives and sends; a delay one way (``us``, ``ms``, ``s``); a loss in percent.

    Raises:
        ValueError: it is none of that.

    Example:
        >>> parse_link("50mbit/10mbit,20ms,0.1%")
        LinkSettings(receive_mbit_s=50.0, send_mbit_s=10.0, delay_ms=20.0, loss=0.001)
        >>> str(parse_link("1gbit,20ms"))
        '1000mbit,20ms'
    """
    rates, *others = text.strip().lower().split(",")
    receive, _, send = rates.partition("/")
    receive_mbit_s = _parse_rate(receive)
    send_mbit_s = _parse_rate(send) if send else receive_mbit_s
    delay_ms, loss = 0.0, 0.0
    for other in others:
        if other.endswith("%"):
            loss = _number(other[:-1], other) / 100
        else:
            delay_ms = _scaled(other, _MS)
    if delay_ms > _MOST_DELAY_MS:
        raise ValueError(f"a delay of {delay_ms / 1e3:g} s; expected at most {_MOST_DELAY_MS / 1e3:g} s")
    if not 0 <= loss < 1:
        raise ValueError(f"a loss of {100 * loss:g} %; expected 0 % or more, and less than 100 %")
    return LinkSettings(receive_mbit_s, send_mbit_s, delay_ms, loss)


def _parse_rate(text: str) -> float | None:
    if text == "unlimited":
        return None
    mbit_s = _scaled(text, _BIT_S) / 1e6
    if not 0.1 <= mbit_s <= 1e6:
        raise ValueError(f"a rate of {text}; expected 100kbit to 1000gbit, or unlimited")
    return mbit_s


def _scaled(text: str, units: dict[str, float]) -> float:
    found = re.fullmatch(r"([0-9.]+)\s*([a-z]+)", text.strip())
    if found is None or found[2] not in units:
        raise ValueError(f"{text!r}; expected a number and one of {', '.join(units)}")
    return _number(found[1], text) * units[found[2]]


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{whole!r} has no number") from None
