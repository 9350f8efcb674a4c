"""Signed URLs: exactly the signed definition, until it expires, in every equivalent spelling."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import QueryParams
from structlog.testing import capture_logs
from typer.testing import CliRunner

from support.shapes.signing import KEYS, query_of
from support.shapes.world import ShapeWorld
from tidemill.base.clock import ManualClock, SystemClock
from tidemill.base.errors import InvalidError
from tidemill.cli.main import app as cli
from tidemill.shapes import ShapeSettings
from tidemill.shapes.definition.permissions import AccessDeniedError
from tidemill.shapes.definition.planner import ShapeRequest
from tidemill.shapes.definition.signed_urls import SigningKeys, canonical_request
from tidemill.shapes.http.authorization import ShapeAuthorizer
from tidemill.shapes.http.params import BadRequestError
from tidemill.shapes.http.responses import limit_cache_control

DDL = """
CREATE TABLE item (id int PRIMARY KEY, tenant text NOT NULL, kind text, secret text);
INSERT INTO item SELECT n, CASE WHEN n % 2 = 0 THEN 'a' ELSE 'b' END, 'k' || n % 3, 's' || n
FROM generate_series(1, 12) n;
"""
NOW_S = 1_700_000_000
REQUEST = ShapeRequest("item", "tenant = $1", ("a",), ("id", "tenant"), "full")


def grants(clock: ManualClock | SystemClock, keys: tuple[str, ...] = ("old", "new"), **more: int) -> ShapeAuthorizer:
    return ShapeAuthorizer(clock, signing=SigningKeys({name: KEYS[name] for name in keys}, **more))


def refused(act: Callable[[], object], status: int = 401) -> str:
    with pytest.raises(AccessDeniedError) as denied:
        act()
    assert denied.value.status == status
    return str(denied.value)


def test_it_counts_until_it_expires_and_says_so_then() -> None:
    clock = ManualClock(NOW_S * 1000)
    query = QueryParams(query_of(REQUEST, NOW_S + 60))
    right = grants(clock).authorize(query, None)
    assert right.request == canonical_request(REQUEST) and right.signed
    assert (right.fresh_ms, right.ends_ms) == ((NOW_S + 60) * 1000, (NOW_S + 90) * 1000)
    clock.advance(89_999)
    assert grants(clock).authorize(query, None)
    clock.advance(1)
    assert "expired at 2023-11-14T22:14:20Z" in refused(lambda: grants(clock).authorize(query, None))
    assert "has expired" in refused(lambda: right.check_valid(clock.now_ms()))
    clock.jump(-600_000)
    assert grants(clock).authorize(query, None), "a clock that is behind"


def test_a_url_for_longer_than_may_be_never_counts() -> None:
    clock = ManualClock(NOW_S * 1000)
    signing = grants(clock, max_s=100, leeway_s=10)
    assert signing.authorize(QueryParams(query_of(REQUEST, NOW_S + 110)), None)
    assert "too far in the future" in refused(
        lambda: signing.authorize(QueryParams(query_of(REQUEST, NOW_S + 111)), None)
    )
    far = QueryParams(query_of(REQUEST, 10**19))
    assert "too far in the future" in refused(lambda: signing.authorize(far, None))


def test_a_key_counts_for_as_long_as_it_is_there_and_no_key_is_shown() -> None:
    clock = ManualClock(NOW_S * 1000)
    query = QueryParams(query_of(REQUEST, NOW_S + 60, "old"))
    assert grants(clock).authorize(query, None)
    with capture_logs() as lines:
        for keys in (("new",), ()):
            refused(lambda: grants(clock, keys).authorize(query, None))  # noqa: B023
        forged = [(name, "new" if name == "key" else value) for name, value in query.multi_items()]
        refused(lambda: grants(clock).authorize(QueryParams(forged), None))
    assert [(line["event"], line["audit"], line["key"]) for line in lines] == [
        ("shape.signature_refused", True, "old"), ("shape.signature_refused", True, "old"),
        ("shape.signature_refused", True, "new"),
    ]  # fmt: skip
    reported = json.dumps(lines) + repr(SigningKeys(KEYS))
    assert not any(key in reported for key in KEYS.values()) and query["signature"] not in reported


NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
REQUESTS = st.builds(
    ShapeRequest,
    st.one_of(
        st.sampled_from(
            [
                "item",
                "Item",
                "public.item",
                '"Odd ""Name"',
                "shop:item",
                "shard.totals",
                "shard:to-tals",
                "tidemill.totals",
            ]
        ),
        NAMES.map(lambda name: '"' + name.replace('"', '""') + '"'),
    ),
    TEXTS,
    st.lists(TEXTS, max_size=3).map(tuple),
    st.lists(NAMES, max_size=3).map(tuple),
    st.sampled_from(["default", "full"]),
    st.sampled_from(["full", "changes_only"]),
    st.lists(NAMES, max_size=2).map(tuple),
)


@given(REQUESTS, st.randoms(use_true_random=False))
def test_whatever_the_order_and_spelling_what_is_served_is_what_was_signed(request: ShapeRequest, rand: object) -> None:
    signing = grants(ManualClock(NOW_S * 1000))
    items = query_of(request, NOW_S + 60)
    assert (
        signing.authorize(QueryParams(items), None).request
        == canonical_request(request)
        == canonical_request(canonical_request(request))
    )
    rand.shuffle(items)  # type: ignore[attr-defined]
    values = {name[7:-1]: value for name, value in items if name.startswith("params[")}
    other = [(name, value) for name, value in items if not name.startswith("params[")]
    if values:
        other.append(("params", json.dumps(values)))
    escaped = "&".join("=".join("".join(f"%{byte:02x}" for byte in part.encode()) for part in item) for item in other)
    assert signing.authorize(QueryParams(escaped.encode()), None).request == canonical_request(request)
    assert signing.authorize(
        QueryParams([*items, ("offset", "-1"), ("live", "true")]), None
    ).request == canonical_request(request)


@given(REQUESTS)
def test_another_program_signs_as_the_documentation_says(request: ShapeRequest) -> None:
    said = canonical_request(request)
    array = [said.table, said.where, said.params, said.columns, said.queryable, said.replica, said.log_mode, 7, "new"]
    text = "tidemill shape url 1\n" + json.dumps(array, ensure_ascii=False, separators=(",", ":"))
    wanted = hmac.new(KEYS["new"].encode(), text.encode(), "sha256").hexdigest()
    assert dict(query_of(request, 7))["signature"] == wanted


@given(REQUESTS, REQUESTS)
def test_no_signature_fits_two_definitions(one: ShapeRequest, other: ShapeRequest) -> None:
    if canonical_request(one) == canonical_request(other):
        return
    signing = grants(ManualClock(NOW_S * 1000))
    signature = dict(query_of(one, NOW_S + 60))["signature"]
    forged = [(name, signature if name == "signature" else value) for name, value in query_of(other, NOW_S + 60)]
    refused(lambda: signing.authorize(QueryParams(forged), None))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("table", "items"), ("table", '"public"."Item"'), ("where", "true"), ("where", "tenant = $1 "),
        ("where", ""), ("params[1]", "b"), ("columns", "id,tenant,secret"), ("columns", "id"), ("columns", ""),
        ("replica", "default"), ("expires", str(NOW_S + 61)), ("expires", "x"), ("expires", ""), ("key", "old"),
        ("key", "none"), ("key", ""), ("signature", ""), ("signature", "0" * 64), ("signature", "é"),
        ("queryable_columns", "id,tenant,secret"), ("log", "changes_only"), ("params[2]", "b"),
        ("params", '{"1": "b"}'),
    ],
)  # fmt: skip
def test_nothing_that_is_signed_can_be_changed(name: str, value: str) -> None:
    signing = grants(ManualClock(NOW_S * 1000))
    items = dict(query_of(REQUEST, NOW_S + 60))
    refused(lambda: signing.authorize(QueryParams([*({**items, name: value}).items()]), None))


def test_what_no_reader_of_a_signed_url_may_add_is_400_and_every_parameter_stands_once() -> None:
    signing = grants(ManualClock(NOW_S * 1000))
    items = query_of(REQUEST, NOW_S + 60)
    for more in (("Table", "x"), ("shape", "mine"), ("x", "1"), ("where", "true"), ("offset", "0_0"), ("ｗhere", "x")):
        with pytest.raises(BadRequestError):
            signing.authorize(QueryParams([*items, ("offset", "-1"), more]), None)
    for broken in ("table", "params[1]", "replica"):
        wrong = [(name, "a.b.c.d" if name == broken == "table" else "%" if name == broken else v) for name, v in items]
        with pytest.raises(InvalidError):
            signing.authorize(QueryParams(wrong), None)


@pytest.mark.parametrize(
    ("header", "left_s", "wanted"),
    [
        ("public, max-age=60, stale-while-revalidate=300", 1000.0, "public, max-age=60, stale-while-revalidate=300"),
        ("public, max-age=60, stale-while-revalidate=300", 100.9, "public, max-age=60, stale-while-revalidate=40"),
        ("public, max-age=60, s-maxage=80", 70.0, "public, max-age=60, s-maxage=70"),
        ("public, max-age=60, must-revalidate", 30.0, "public, max-age=30, must-revalidate"),
        ("public, max-age=60", 0.9, "no-store"),
        ("no-cache", 30.0, "no-cache"),
    ],
)
def test_no_cache_shows_an_answer_when_the_right_to_it_is_over(header: str, left_s: float, wanted: str) -> None:
    assert limit_cache_control(header, left_s) == wanted


@pytest.mark.postgres
async def test_a_signed_url_shows_its_shape_without_the_secret_and_nothing_else(postgres_dsn: str) -> None:
    clock = SystemClock()
    settings = ShapeSettings(long_poll_s=5, secret="the secret", allow_delete=True)
    async with ShapeWorld(postgres_dsn, DDL, settings, grants=grants(clock, leeway_s=0)) as world:
        now_s = clock.now_ms() // 1000
        signed = dict(query_of(REQUEST, now_s + 30))
        found = await world.get(**signed, offset="-1")
        assert found.status == 200 and {item["value"]["id"] for item in found.items} == {
            str(n) for n in range(2, 13, 2)
        }
        assert {name for item in found.items for name in item["value"]} == {"id", "tenant"}
        kept = dict(re.findall(r"([a-z-]+)=(\d+)", found.headers["cache-control"]))
        assert found.headers["cache-control"].startswith("public") and 0 < int(kept["max-age"]) <= 30
        assert int(kept["s-maxage"]) + int(kept.get("stale-while-revalidate", 0)) <= 30
        plain = {"table": "item", "offset": "-1"}
        assert (await world.get(**plain)).status == 401
        other = await world.get(**plain, secret="the secret")
        refetch = await world.get(**signed, offset="0_inf", handle=other.handle)
        assert refetch.status == 409 and refetch.handle == found.handle, "a handle is no right"
        subset = dict(query_of(msgspec.structs.replace(REQUEST, log_mode="changes_only"), now_s + 30))
        for clause in ("true", "tenant = 'b' OR true", "id > 0"):
            rows = (await world.post({"where": clause, "table": "other"}, **subset, offset="now")).json["data"]
            assert {row["value"]["tenant"] for row in rows} == {"a"}
            got = await world.get(**subset, offset="now", subset__where=clause)
            assert {row["value"]["tenant"] for row in got.json["data"]} == {"a"}
        assert (await world.post({"where": "secret = 's2'"}, **subset, offset="now")).status == 400
        assert (await world.request("/api/shapes", {"signature": "x"})).status == 401
        for handle in (found.handle, other.handle):
            ended = await world.request("/v1/shape", {**signed, "handle": handle}, method="DELETE")
            assert ended.status == 403

        first = await world.get(**signed, offset="-1")
        for sse, status in (({}, 401), ({"live_sse": "true"}, 200)):
            for _ in range(10):  # on a busy machine it may be over before the request is there
                soon = dict(query_of(REQUEST, clock.now_ms() // 1000 + 2))
                live = await world.get(**soon, offset=first.offset, handle=first.handle, live="true", **sse)
                assert clock.now_ms() >= int(soon["expires"]) * 1000, "it ended when the right did, and not before"
                if live.status == status:
                    break
            assert live.status == status
        late = await world.get(**soon, offset="-1")
        assert late.status == 401 and "expired at" in late.json["message"]
        assert late.headers["cache-control"] == "no-store"


def test_the_command_signs_what_the_server_accepts(tmp_path: Path) -> None:
    path = tmp_path / "tidemill.toml"
    keys = ", ".join(f'{name} = "{key}"' for name, key in KEYS.items())
    path.write_text(f'[security.signing]\nkeys = {{ {keys} }}\nuse = "new"\nmax_s = 7200\n')
    runner = CliRunner()

    def sign(*arguments: str) -> tuple[int, str]:
        done = runner.invoke(cli, ["shape", "sign", *arguments, "--config", str(path)])
        return done.exit_code, done.output if done.exception is None else str(done.exception)

    wanted = ("public.item", "--where", "tenant = $1 AND kind = $2", "--param", "a'\"é", "--param", "")
    code, text = sign(*wanted, "--columns", 'id,"Odd, Name"', "--replica", "full", "--json")
    assert code == 0
    said = json.loads(text.splitlines()[-1])
    assert said["key"] == "new" and said["url"].startswith("http://127.0.0.1:8600/v1/shape?")
    right = grants(SystemClock()).authorize(QueryParams(urlsplit(said["url"]).query), None)
    assert right.request == ShapeRequest(
        '"public"."item"', "tenant = $1 AND kind = $2", ("a'\"é", ""), ("Odd, Name", "id"), "full", "full",
        ("Odd, Name", "id"),
    )  # fmt: skip
    code, text = sign("tidemill.totals", "--key", "old", "--url", "https://shop.example/", "--expires-s", "60")
    assert code == 0 and text.startswith("https://shop.example/v1/shape?")
    query = dict(parse_qsl(urlsplit(text.strip()).query))
    assert (query["key"], query["table"]) == ("old", "tidemill.totals")
    for arguments, words in (
        (("item", "--where", "tenant = $1"), "values are given"), (("item", "--where", "tenant ="), "--where"),
        (("a.b.c",), "table"), (("item", "--expires-s", "7201"), "max_s"), (("item", "--key", "k9"), "no such key"),
        (("item", "--replica", "none"), "replica"),
    ):  # fmt: skip
        code, text = sign(*arguments)
        assert code != 0 and words in text, arguments
    path.write_text(f"[security.signing]\nkeys = {{ {keys} }}\n")
    assert "several signing keys" in sign("item")[1]
    path.write_text("")
    assert "security.signing.keys" in sign("item")[1]


@pytest.mark.parametrize("spelling", ["tidemill.totals", "shard.totals", "shard:totals", 'tidemill."totals"'])
def test_a_signature_of_a_table_of_pipelines_is_the_same_for_every_spelling(spelling: str) -> None:
    said = ["shard:totals", "", [], [], [], "default", "full", NOW_S + 60, "new"]
    text = json.dumps(said, separators=(",", ":")).encode()
    signature = hmac.new(KEYS["new"].encode(), b"tidemill shape url 1\n" + text, hashlib.sha256).hexdigest()
    query = {"table": spelling, "expires": str(NOW_S + 60), "key": "new", "signature": signature}
    right = grants(ManualClock(NOW_S * 1000)).authorize(QueryParams(query), None)
    assert right.signed and right.request is not None and right.request.table == "shard:totals"
    assert dict(query_of(ShapeRequest(spelling), NOW_S + 60)) == query | {"table": "tidemill.totals"}
    refused(
        lambda: grants(ManualClock(NOW_S * 1000)).authorize(QueryParams(query | {"table": '"shard"."totals"'}), None)
    )


def test_urlencode_of_the_command_and_of_a_browser_mean_the_same() -> None:
    """`+` and `%20`, brackets and quotes have one meaning and one signature."""
    items = query_of(ShapeRequest('"a b"', "x = $1 + 1", ("1+1 =2",)), NOW_S + 60)
    signing = grants(ManualClock(NOW_S * 1000))
    plus, percent = urlencode(items), urlencode(items, quote_via=quote)
    assert plus != percent
    assert signing.authorize(QueryParams(plus), None) == signing.authorize(QueryParams(percent), None)
