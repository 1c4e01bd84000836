"""The network interface by which a machine reaches another."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15


def interface_towards(host: str) -> str | None:
    """Names the interface whose address packets to a host come from; None: it is not known.

    Args:
        host: name or address, of IPv4.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            # Nothing is sent: the kernel chooses a route alone.
            asked.connect((host, 9))
        except OSError:
            return None
        own = asked.getsockname()[0]
        for _, name in socket.if_nameindex():
            wanted = struct.pack("256s", name.encode()[:_NAME_BYTES])
            try:
                found = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, wanted)
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == own:
                return name
    return None
