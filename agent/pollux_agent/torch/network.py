"""Which network interface leads to an address."""

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def interface_towards(address: str) -> str:
    """Name of the interface whose own IPv4 address this machine uses to talk to ``address``.

    Raises OSError if there is none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == own:
                return name
    raise OSError(f"no network interface has the address {own}, which leads to {address}")
