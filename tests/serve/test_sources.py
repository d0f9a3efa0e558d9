"""What is fetched for a request, step by step and without a network: redirects, statuses, ports and what is asked."""

import asyncio
import itertools
import socket
import ssl
import time
from types import SimpleNamespace
from urllib.parse import SplitResult

import pytest

from m3jax.serve.gateway import sources as sources_module
from m3jax.serve.gateway.sources import Sources, is_public

HERE = "http://a.example/x/a.png"


def fetched(monkeypatch, *answers, hosts=("a.example",), url=HERE) -> tuple[bytes, list[str]]:
    """What `read` returns where hosts answer so, one after the other, and the URLs that were asked for."""
    asked, left = [], list(answers)

    def get(self, parts: SplitResult, most: int, deadline: float):
        asked.append(parts.geturl())
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Sources, "_get", get)
    try:
        return asyncio.run(Sources.of(list(hosts)).read("image", url)), asked
    except ValueError as error:
        return str(error), asked


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    ("location", "then"),
    [
        ("b.png", "http://a.example/x/b.png"),
        ("/b.png?c=1", "http://a.example/b.png?c=1"),
        ("https://a.example:8443/b.png", "https://a.example:8443/b.png"),
    ],
)
def test_a_redirect_is_read_from_where_it_was_said(monkeypatch, status, location, then):
    assert fetched(monkeypatch, (status, location, b"moved"), (200, None, b"found")) == (b"found", [HERE, then])


def test_how_far_redirects_go(monkeypatch):
    """Three are followed and a fourth is not, none to another host, also an allowed one, or to another kind of URL."""
    moved = (302, "b.png", b"")
    assert fetched(monkeypatch, *[moved] * 3, (200, None, b"found"))[0] == b"found"
    said, asked = fetched(monkeypatch, *[moved] * 5)
    assert "more than 3 redirects" in said and len(asked) == 4
    for location, says in (
        ("http://b.example/a.png", "a redirect to another host is not followed"),
        ("http://c.example/a.png", "does not fetch from there"),
        ("ftp://a.example/a.png", "does not fetch from there"),
    ):
        said, asked = fetched(monkeypatch, (302, location, b""), hosts=("a.example", "b.example"))
        assert says in said and asked == [HERE]


@pytest.mark.parametrize("status", [199, 201, 204, 206, 300, 304, 401, 404, 500])
def test_only_200_has_the_bytes(monkeypatch, status):
    assert fetched(monkeypatch, (status, None, b"no")) == (
        f"'{HERE}' cannot be fetched: it answers with the status {status}", [HERE],
    )  # fmt: skip


def test_what_else_may_come(monkeypatch):
    """A redirect to nowhere, an error without words, as many bytes as may be and one more; hosts in any case."""
    assert "the status 302" in fetched(monkeypatch, (302, None, b""))[0]
    assert fetched(monkeypatch, TimeoutError())[0].endswith("cannot be fetched: TimeoutError")
    assert fetched(monkeypatch, OSError("no route"))[0].endswith("cannot be fetched: no route")
    monkeypatch.setattr(sources_module, "_MOST_URL_BYTES", {"image": 3})
    assert fetched(monkeypatch, (200, None, b"123"))[0] == b"123"
    assert "larger than 3 bytes" in fetched(monkeypatch, (200, None, b"1234"))[0]
    assert fetched(monkeypatch, (200, None, b"1"), hosts=("A.Example",), url="HTTP://A.EXAMPLE/")[0] == b"1"
    for url in ("http://b.example/a.png", "http:///a.png", "ftp://a.example/a.png", "//a.example/a.png"):
        said, asked = fetched(monkeypatch, (200, None, b"1"), url=url)
        assert not asked and ("does not fetch" in said or "data URL" in said)
    for wrong in ("", "a.example:80", "http://a.example", "a/b"):
        with pytest.raises(ValueError, match="give a host's name"):
            Sources.of([wrong])


def connected(monkeypatch, url: str, *answers: bytes, most: int = 100):
    """What `read` returns where a host answers so, connection by connection, and what was seen of each of these."""
    sockets, seen = [socket.socketpair() for _ in answers], []
    for (_, theirs), answer in zip(sockets, answers, strict=True):
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)
    left = [ours for ours, _ in sockets]

    def getaddrinfo(host, port, **_):
        seen.append({"looked up": (host, port)})
        return [(2, 1, 6, "", ("93.184.216.34", port)), (2, 1, 6, "", ("93.184.216.35", port))]

    def create_connection(address, timeout):
        seen[-1] |= {"connected": address, "timeout": timeout}
        return left.pop(0)

    class Context:
        def wrap_socket(self, plain, server_hostname):
            seen[-1]["tls"] = server_hostname
            return plain

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "create_connection", create_connection)
    monkeypatch.setattr(ssl, "create_default_context", Context)
    monkeypatch.setattr(sources_module, "_MOST_URL_BYTES", {"image": most})
    try:
        found = asyncio.run(Sources.of(["a.example"]).read("image", url))
        sent = [theirs.recv(1 << 16).decode() for _, theirs in sockets]
        return found, [each | {"sent": text} for each, text in zip(seen, sent, strict=True)]
    finally:
        for _, theirs in sockets:
            theirs.close()


@pytest.mark.parametrize(
    ("url", "port", "tls", "path"),
    [
        ("http://a.example", 80, None, "/"),
        ("https://a.example/", 443, "a.example", "/"),
        ("http://a.example:8080/x/y?z=1&w", 8080, None, "/x/y?z=1&w"),
        ("https://a.example:8443/x", 8443, "a.example", "/x"),
    ],
)
def test_what_a_host_is_asked(monkeypatch, url, port, tls, path):
    """At the port of the URL or of its scheme, at the first of its addresses, in the time that is left."""
    moved = b"HTTP/1.1 302 Found\r\nLocation: /there\r\nContent-Length: 5\r\n\r\nmoved"
    found, seen = connected(monkeypatch, url, moved, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfound")
    assert found == b"found" and len(seen) == 2
    for each, asked in zip(seen, (path, "/there"), strict=True):
        assert each["looked up"] == ("a.example", port) and each["connected"] == ("93.184.216.34", port)
        assert each.get("tls") == tls and 19 < each["timeout"] <= 20
        lines = each["sent"].split("\r\n")
        assert lines[0] == f"GET {asked} HTTP/1.1"
        assert "Accept-Encoding: identity" in lines and "User-Agent: m3jax" in lines
        host = f"Host: a.example{'' if port in (80, 443) else f':{port}'}"
        assert host in [line.removesuffix(":443") for line in lines]


def test_a_body_of_a_host_has_as_many_bytes_as_may_be(monkeypatch):
    """Also one whose length nobody says."""
    body = bytes(range(200))
    for head in (b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n"):
        assert connected(monkeypatch, HERE, head + body, most=200)[0] == body
        with pytest.raises(ValueError, match="larger than 199 bytes"):
            connected(monkeypatch, HERE, head + body, most=199)


def test_a_fetch_has_20_seconds(monkeypatch):
    deadlines = []

    def get(self, parts, most, deadline):
        deadlines.append(deadline - time.monotonic())
        return (302, "b", b"") if len(deadlines) < 3 else (200, None, b"")

    monkeypatch.setattr(Sources, "_get", get)
    asyncio.run(Sources.of(["a.example"]).read("image", HERE))
    assert len(deadlines) == 3 and 19 < deadlines[2] < deadlines[0] <= 20  # of all redirects together


def test_a_fetch_that_trickles_is_given_up(monkeypatch):
    """Every piece is waited for in what is left of the 20 seconds, though none takes long."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfound"
    for seconds, is_found in ((4, True), (6, False)):  # from one look at the clock to the next
        clock = itertools.count(0, seconds)
        monkeypatch.setattr(sources_module, "time", SimpleNamespace(monotonic=lambda clock=clock: next(clock)))
        if is_found:
            assert connected(monkeypatch, HERE, answer)[0] == b"found"
        else:
            with pytest.raises(ValueError, match="it takes more than 20 seconds"):
                connected(monkeypatch, HERE, answer)


def test_every_address_of_a_host_is_looked_at(monkeypatch):
    for addresses in (("93.184.216.34", "10.0.0.1"), ("10.0.0.1", "93.184.216.34")):
        found = [(2, 1, 6, "", (address, 80)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it was connected to"))
        with pytest.raises(ValueError, match="cannot be fetched: its address is not one of the Internet"):
            asyncio.run(Sources.of(["a.example"]).read("image", HERE))
    assert is_public("::ffff:93.184.216.34") and not is_public("::ffff:10.0.0.1") and not is_public("ff02::1")


def test_folders_are_read_in_whole(tmp_path, monkeypatch):
    """A name is unquoted; as many bytes as may be, and no more."""
    (tmp_path / "a b.png").write_bytes(b"123")
    monkeypatch.setattr(sources_module, "_MOST_URL_BYTES", {"image": 3})
    sources = Sources.of([str(tmp_path), "a.example"])
    assert (sources.folders, sources.hosts) == ((tmp_path.resolve(),), frozenset({"a.example"}))
    read = lambda name: asyncio.run(sources.read("image", f"file://{tmp_path}/{name}"))
    assert read("a%20b.png") == b"123"
    (tmp_path / "c.png").write_bytes(b"1234")
    with pytest.raises(ValueError, match="larger than 3 bytes"):
        read("c.png")
    with pytest.raises(ValueError, match="give the image as a data URL"):
        asyncio.run(sources.read("image", 5))
