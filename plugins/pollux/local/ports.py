"""Free ports on loopback."""

import random
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
_FIRST = 20_000
_TRIES = 100
_FOR_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` of loopback now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(preferred: int | None = None) -> int:
    """``preferred`` if it is free, else a random one that is.

    A server listens on it only some time later. Until then none of this machine's connections may come by it
    as their own end, so it is below the ports that the kernel gives to connections, where there is room.
    """
    if preferred is not None and is_free(preferred):
        return preferred
    end = _first_for_connections()
    if end > _FIRST + _TRIES:
        choice = random.SystemRandom()
        for _ in range(_TRIES):
            if is_free(port := choice.randrange(_FIRST, end)):
                return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _first_for_connections() -> int:
    """The lowest port that the kernel gives to an outgoing connection; 0 where it does not say."""
    try:
        return int(_FOR_CONNECTIONS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
