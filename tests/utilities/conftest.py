"""What the tests of this directory share."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A port of the loopback device that nobody listens on."""

    def find() -> int:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port: int = server.getsockname()[1]
            return port

    return find
