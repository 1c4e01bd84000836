"""Addresses of prefill ranks, `tcp://HOST:PORT`."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit


def own_host(address: str) -> str:
    """Returns the address of this machine, as the machine at an address sees it.

    Raises:
        ValueError: the address cannot be read, or its host has no IPv4 address.
    """
    host, port = parts(address)
    check_host(host, address)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: the kernel only chooses the interface.
            probe.connect((host, port))
            own: str = probe.getsockname()[0]
            return own
    except OSError as error:
        raise ValueError(f"{address}: there is no way to {host}: {error.strerror}") from None


def check_host(host: str, given: str) -> None:
    """Checks that a host has an IPv4 address.

    Args:
        host: its name or address.
        given: what a user has given.

    Raises:
        ValueError: it has none; the message begins with what was given.
    """
    try:
        socket.getaddrinfo(host, None, socket.AF_INET)
        return
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
    try:
        socket.getaddrinfo(host, None, socket.AF_INET6)
    except (OSError, UnicodeError):
        raise ValueError(f"{given}: the host {host} cannot be found: {why}") from None
    raise ValueError(
        f"{given}: {host} is an IPv6 address, or has nothing else: give an IPv4 address, or a name "
        "that has one"
    )


def parts(address: str) -> tuple[str, int]:
    """Host and port of an address."""
    try:
        place = urlsplit(address)
        # Asking for a port raises if it is none.
        host, port = place.hostname, place.port
    except ValueError as error:
        raise ValueError(f"{address}: give an address as tcp://HOST:PORT ({error})") from None
    if place.scheme != "tcp" or not host or not port or place.path:
        raise ValueError(f"{address}: give an address as tcp://HOST:PORT")
    return host, port
