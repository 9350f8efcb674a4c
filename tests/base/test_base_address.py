"""Addresses: one notation in, one notation out, and no host with brackets where a socket or a client takes it."""

from __future__ import annotations

import socket

import pytest

from tidemill.base.address import Address, canonical_host, without_credentials


@pytest.mark.parametrize(
    ("text", "host", "port", "family"),
    [
        ("127.0.0.1:8600", "127.0.0.1", 8600, socket.AF_INET),
        ("kafka.example.com:9092", "kafka.example.com", 9092, socket.AF_INET),
        ("[::1]:8600", "::1", 8600, socket.AF_INET6),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1, socket.AF_INET6),
        ("0.0.0.0:0", "0.0.0.0", 0, socket.AF_INET),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, host: str, port: int, family: socket.AddressFamily) -> None:
    found = Address.parse(text)
    assert found == (host, port)
    assert found.family == family
    assert str(found) == text


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:x", "host:65536", "host:²", "[]:1", "host:-1"])
def test_text_without_a_host_or_a_port_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        Address.parse(text)


@pytest.mark.parametrize("text", ["::1:8600", "[host]:1", "[::1:1", "::1]:1"])
def test_an_ipv6_address_without_its_brackets_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="in brackets"):
        Address.parse(text)


def test_wildcards_and_loopback_are_known_in_both_families() -> None:
    assert Address.parse("[::]:1").is_wildcard and Address.parse("0.0.0.0:1").is_wildcard
    assert not Address.parse("[::1]:1").is_wildcard and not Address.parse("localhost:1").is_wildcard
    assert all(Address.parse(text).is_loopback for text in ("[::1]:1", "127.0.0.9:1", "localhost:1"))
    assert not Address.parse("[2001:db8::1]:1").is_loopback


@pytest.mark.parametrize(
    ("host", "plain"),
    [
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("::FFFF:a00:5", "10.0.0.5"),
        ("::ffff:nothing", "::ffff:nothing"),
        ("::ffff:0:10.0.0.5", "::ffff:0:10.0.0.5"),
        ("::1", "::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("10.0.0.5", "10.0.0.5"),
        ("*", "*"),
        ("", ""),
    ],
)
def test_an_address_of_ipv4_within_one_of_ipv6_is_that_of_ipv4(host: str, plain: str) -> None:
    assert canonical_host(host) == plain


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgres+psycopg://u:s3cret@h/db", "postgres+psycopg://h/db"),
        ("x://u@h:5432/db", "x://h:5432/db"),
        ("x://u:s3/cr?e#t@h/db", "x://h/db"),
        ("x://u:s3@cret@h/db", "x://h/db"),
        ("x://h/d@b?a=b@c", "x://h/d@b?a=b@c"),
        ("x://u:1234/s3cret@h/db", "x://h/db"),
        ("x://u:1234?s3cret@h/db", "x://h/db"),
        ("x:/u:s3cret@h/db", "h/db"),
        ("x:u:s3@cret@h/db", "h/db"),
        ("x//u:s3cret@h/db", "h/db"),
        ("s3:AK:SK@bucket", "bucket"),
        ("host=h:1 password='s3@cret' dbname=d", "host=h:1 password=*** dbname=d"),
        ("s3://arn:aws:s3:eu:1:accesspoint/x", "s3://arn:aws:s3:eu:1:accesspoint/x"),
        ("file:///a@b/c:d", "file:///a@b/c:d"),
        ("/a@b:c", "/a@b:c"),
        ("x://h/db?user=u&password=s3cret&a=1", "x://h/db?user=u&password=***&a=1"),
        ("host=h password = 's3 cr\\'et' dbname=d", "host=h password = *** dbname=d"),
        ("", ""),
    ],
)
def test_a_url_in_a_message_has_no_user_and_no_password(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


@pytest.mark.parametrize(
    ("bound", "resolves", "host"),
    [
        ("0.0.0.0:9092", True, "box"),
        ("[::]:9092", True, "box"),
        ("0.0.0.0:9092", False, "0.0.0.0"),
        ("[::]:9092", False, "::"),
        ("10.0.0.5:9092", True, "10.0.0.5"),
        ("127.0.0.1:9092", True, "127.0.0.1"),
    ],
)
def test_clients_are_sent_to_the_machine_and_not_to_a_wildcard(
    monkeypatch: pytest.MonkeyPatch, bound: str, resolves: bool, host: str
) -> None:
    asked: list[int] = []

    def resolve(name: str, _: None, *, family: int) -> None:
        asked.append(family)
        if name != "box" or not resolves:
            raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert Address.parse(bound).advertised("") == (host, 9092)
    wildcard = Address.parse(bound).is_wildcard
    # A socket of 0.0.0.0 accepts no IPv6, one of [::] accepts both.
    assert asked == ([socket.AF_INET if "." in bound else socket.AF_UNSPEC] if wildcard else [])
    assert Address.parse(bound).advertised("[2001:db8::1]") == ("2001:db8::1", 9092), "the configured host"
