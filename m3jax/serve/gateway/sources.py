"""The bytes of an image or a video that a request names: a data URL, and what the operator allows besides.

An address in a request is a way to make the server ask other machines on the requester's behalf. So nothing is fetched
unless its host was allowed by name; the name is resolved once, no address of a private network is taken, the
connection goes to that very address, and a redirect may not leave the host.
"""

import asyncio
import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from m3jax.media import LIMITS, media_source
from m3jax.messages import shown

MOST_BYTES = {"image": LIMITS.image_bytes, "video": LIMITS.video_bytes}
_MOST_URL_BYTES = {"image": LIMITS.image_bytes, "video": 250 << 20}
_MOST_REDIRECTS = 3
_SECONDS = 20.0  # for all of one fetch


def is_public(address: str) -> bool:
    """True for an address of the Internet: no loopback, private, link-local, multicast or reserved one.

    Args:
      address: an IPv4 or IPv6 address; an IPv4 address within IPv6 counts as itself.
    """
    ip = ipaddress.ip_address(address.split("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None)
    ip = mapped or ip
    return ip.is_global and not ip.is_multicast


@dataclass(frozen=True)
class Sources:
    """The rule that says which media may be read for requests.

    Attributes:
      hosts: from which http and https addresses are fetched.
      folders: from which file:// addresses are read.
      is_allowed: says of an IP address whether it may be connected to.
    """

    hosts: frozenset[str] = frozenset()
    folders: tuple[Path, ...] = ()
    is_allowed: Callable[[str], bool] = is_public

    @classmethod
    def of(cls, allowed: Sequence[str]) -> "Sources":
        """Return the rules of `--allow-media`: names of hosts, and folders, which are absolute paths.

        Raises:
          ValueError: a folder that is not there, or a host with a scheme or a path.
        """
        folders = tuple(Path(each).resolve() for each in allowed if each.startswith("/"))
        hosts = frozenset(each.lower() for each in allowed if not each.startswith("/"))
        for folder in folders:
            if not folder.is_dir():
                raise ValueError(f"--allow-media {folder}: no such folder")
        for host in hosts:
            if "/" in host or ":" in host or not host:
                raise ValueError(f"--allow-media {shown(host)}: give a host's name, as in example.org, or a folder")
        return cls(hosts, folders)

    async def read(self, kind: str, source: object) -> bytes:
        """Return the bytes of an image or a video.

        Args:
          kind: "image" or "video".
          source: what the request gives: a data URL, or an http, https or file URL.

        Raises:
          ValueError: not such a text, one that is not allowed, too large, too slow or not there.
        """
        if not isinstance(source, str):
            raise ValueError(f"{shown(source)}: give the {kind} as a data URL")
        scheme = source.partition(":")[0].lower()
        if scheme == "data":
            return await asyncio.to_thread(media_source, source, MOST_BYTES[kind])
        if scheme in ("http", "https"):
            return await asyncio.to_thread(self._fetch, source, _MOST_URL_BYTES[kind], time.monotonic() + _SECONDS)
        if scheme == "file":
            return await asyncio.to_thread(self._read_file, source, _MOST_URL_BYTES[kind])
        raise ValueError(f"{shown(source)}: give the {kind} as a data URL, data:{kind}/...;base64,...")

    def _read_file(self, url: str, most: int) -> bytes:
        path = Path(unquote(urlsplit(url).path)).resolve()  # links and .. are followed before it is compared
        if not any(path.is_relative_to(folder) for folder in self.folders):
            raise ValueError(f"{shown(url)}: this server does not read files there; give a data URL")
        try:
            with path.open("rb") as file:
                data = file.read(most + 1)
        except OSError as error:
            raise ValueError(f"{shown(url)}: {error.strerror}") from None
        return _within(data, most, url)

    def _fetch(self, url: str, most: int, deadline: float) -> bytes:
        host = None
        for _ in range(_MOST_REDIRECTS + 1):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or parts.hostname is None or parts.hostname not in self.hosts:
                raise ValueError(f"{shown(url)}: this server does not fetch from there; give a data URL")
            if host not in (None, parts.hostname):
                raise ValueError(f"{shown(url)}: a redirect to another host is not followed")
            host = parts.hostname
            try:
                status, location, data = self._get(parts, most, deadline)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ValueError(f"{shown(url)} cannot be fetched: {str(error) or type(error).__name__}") from None
            if status in (301, 302, 303, 307, 308) and location:
                url = urljoin(url, location)
                continue
            if status != 200:
                raise ValueError(f"{shown(url)} cannot be fetched: it answers with the status {status}")
            return _within(data, most, url)
        raise ValueError(f"{shown(url)} cannot be fetched: more than {_MOST_REDIRECTS} redirects")

    def _get(self, parts, most: int, deadline: float) -> tuple[int, str | None, bytes]:
        """Ask one host once: return the status, where it redirects to, and up to one byte more than may come."""
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        address = found[0][4][0]
        if not all(self.is_allowed(each[4][0]) for each in found):
            raise ValueError("its address is not one of the Internet")
        connection = http.client.HTTPConnection(parts.hostname, port, timeout=_seconds_to(deadline))
        plain = socket.create_connection((address, port), timeout=_seconds_to(deadline))  # not the name: it may change
        try:
            context = ssl.create_default_context() if is_tls else None
            stream = context.wrap_socket(plain, server_hostname=parts.hostname) if context else plain
            connection.sock = stream
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"User-Agent": "m3jax", "Accept-Encoding": "identity"})
            with connection.getresponse() as response:
                data = bytearray()
                while len(data) <= most:
                    stream.settimeout(_seconds_to(deadline))
                    piece = response.read1(min(1 << 16, most + 1 - len(data)))
                    if not piece:
                        break
                    data += piece
                return response.status, response.getheader("Location"), bytes(data)
        finally:
            connection.close()
            plain.close()


def _seconds_to(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise ValueError(f"it takes more than {_SECONDS:g} seconds")
    return remaining


def _within(data: bytes, most: int, url: str) -> bytes:
    if len(data) > most:
        raise ValueError(f"{shown(url)} is larger than {most} bytes")
    return data
