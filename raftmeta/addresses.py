"""`host:port` as text: one way to read it, one way to write it, and what counts as this machine alone."""

from __future__ import annotations

import ipaddress
import re

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\Z")


def split_address(text: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`. Raises ValueError that says what was found."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not is_host(host) or (":" in host) != bracketed or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"expected host:port, found {text[:200]!r}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_host(text: str) -> bool:
    """A DNS name or an IP address without brackets."""
    if ":" not in text:
        return bool(_HOST.match(text))
    return is_ip(text)


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
