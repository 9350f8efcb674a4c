"""Shapes that the server defines: permitted parameters of a client, and its visible rows."""

from __future__ import annotations

import json
import re
from urllib.parse import quote, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.shapes.fake_shard import FakeShard
from support.shapes.world import ShapeWorld
from tidemill.base.clock import SystemClock
from tidemill.base.errors import InvalidError
from tidemill.base.pgtypes.arrays import read_array
from tidemill.shapes import ShapeSettings
from tidemill.shapes.definition.permissions import AccessDeniedError
from tidemill.shapes.definition.server_defined import FromClaim, FromClient, ServerDefinedShape, claim_text
from tidemill.shapes.http.authorization import ShapeAuthorizer
from tidemill.shapes.where import Type, combine, compile_where
from tidemill.shards.api import Column, ShardSchema

DDL = """
CREATE TABLE item (id int PRIMARY KEY, tenant text NOT NULL, kind text, "Odd, Name" int, secret text);
INSERT INTO item SELECT n, CASE WHEN n % 2 = 0 THEN 'a''; --' ELSE 'b' END, 'k' || n % 3, n, 's' || n
FROM generate_series(1, 12) n;
"""
TENANT = "a'; --"
SHOWN = ("id", "tenant", "kind", "Odd, Name")
NAMED = (
    ServerDefinedShape("mine", "item", "tenant = $1", (TENANT,), SHOWN, "full"),
    ServerDefinedShape("kinds", "public.item", "tenant = $1 AND kind = $2", (TENANT, FromClient(1))),
    ServerDefinedShape("numbered", "item", "tenant = $1 AND id > $2", (TENANT, FromClient(1))),
    ServerDefinedShape("narrow", "item", "tenant = $1", (TENANT,), SHOWN, narrow=True),
    ServerDefinedShape("broken", "item", "gone = $1", ("secret value",)),
    ServerDefinedShape("away", "absent"),
    ServerDefinedShape("failing", "item", "CAST(secret AS int) > $1", ("5",), SHOWN, narrow=True),
)


def grants() -> ShapeAuthorizer:
    return ShapeAuthorizer(SystemClock(), NAMED)


def ids(items: list[dict[str, object]]) -> set[str]:
    return {str(item["value"]["id"]) for item in items if item.get("value")}  # type: ignore[index]


EVEN = {str(n) for n in range(2, 13, 2)}


@pytest.mark.postgres
async def test_a_client_names_a_shape_and_adds_what_the_protocol_needs_and_nothing_else(postgres_dsn: str) -> None:
    settings = ShapeSettings(long_poll_s=0.3, allow_delete=True)
    async with ShapeWorld(postgres_dsn, DDL, settings, grants=grants()) as world:
        found = await world.get(shape="mine", offset="-1")
        assert found.status == 200 and ids(found.items) == EVEN
        assert set(found.items[0]["value"]) == set(SHOWN)
        assert found.headers["cache-control"].startswith("public, max-age=604800")
        same = await world.get(
            table="item", where="tenant = $1", columns='id,tenant,kind,"Odd, Name"', replica="full", offset="-1",
            **{"params[1]": TENANT},
        )  # fmt: skip
        assert same.handle == found.handle, "equal definitions share one log"
        for more in (
            "log=changes_only", "live=false", "cursor=7", "expired_handle=1-1", "cache-buster=x", "secret=x",
            "subset__where=id=4", "%6Fffset=-1",
        ):  # fmt: skip
            asked = more if more.startswith("%6F") else f"offset=-1&{more}"
            assert (await world.ask(f"/v1/shape?shape=mine&{asked}")).status == 200, more
        for more in (
            "table=item", "table=", "%74able=item", "Table=item", "where=true", "where=", "WHERE=true",
            "columns=id", "queryable_columns=id", "replica=default", "params[1]=b", "params%5B1%5D=b", "params=",
            "params=" + quote(json.dumps({"1": "b"})), "shape=mine", "shape=kinds", "offset=-1",
            "handle=1-1&handle=1-1", "x=1", "signature", "signature=x", "wh%65re=true", "where%00=x",
            "%EF%BD%97here=true", "[where]=x",
        ):  # fmt: skip
            for method in ("GET", "HEAD", "POST"):
                body = b"{}" if method == "POST" else None
                answer = await world.ask(f"/v1/shape?shape=mine&offset=-1&{more}", method, body)
                assert answer.status in (400, 401) and b'"value"' not in answer.body, (method, more)
        for body in ({"table": "item"}, {"columns": ["secret"]}, {"shape": "narrow"}, {"where": "true OR true"}):
            answer = await world.post(body, shape="mine", log="changes_only")
            assert {row["value"]["id"] for row in answer.json["data"]} == EVEN, body
            assert set(answer.json["data"][0]["value"]) == set(SHOWN)
        hidden = [
            await world.post({"where": f"{column} = 's2'"}, shape="mine") for column in ("secret", "no_such_column")
        ]
        assert [answer.status for answer in hidden] == [400, 400]
        assert (await world.get(shape="nothing", offset="-1")).status == 404
        assert (await world.request("/v1/shape", {"shape": "mine", "handle": "1-1"}, method="DELETE")).status == 404
        other = await world.get(table="item", offset="-1")
        ending = {"shape": "mine", "handle": other.handle}
        assert (await world.request("/v1/shape", ending, method="DELETE")).status == 404, "no handle is a right"
        refetch = await world.get(shape="mine", offset="0_inf", handle=other.handle)
        assert refetch.status == 409 and refetch.handle == found.handle
        ending["handle"] = found.handle
        assert (await world.request("/v1/shape", ending, method="DELETE")).status == 202


@pytest.mark.postgres
async def test_f118_values_of_clients_are_values_and_a_definition_that_fails_is_not_theirs_to_read(
    postgres_dsn: str,
) -> None:
    async with ShapeWorld(postgres_dsn, DDL, grants=grants()) as world:
        for given in ({"params[1]": "k1"}, {"params": '{"1": "k1"}'}, {"params": '["k1"]'}):
            found = await world.get(shape="kinds", offset="-1", **given)
            assert ids(found.items) == {"4", "10"}
        odd = await world.get(shape="kinds", offset="-1", **{"params[1]": "k1' OR true --"})
        assert odd.status == 200 and odd.items == []
        for wrong in ({}, {"params[1]": "k1", "params[2]": "b"}, {"params[2]": "k1"}, {"params": "k1"}):
            answer = await world.get(shape="kinds", offset="-1", **wrong)
            assert answer.status == 400 and "params" in answer.json["errors"], wrong
        answer = await world.get(shape="numbered", offset="-1", **{"params[1]": "many"})
        assert answer.status == 400 and answer.json["errors"] == {"params": ["The values do not fit this shape."]}
        for name in ("broken", "away", "failing"):
            answer = await world.get(shape=name, offset="-1")
            assert answer.status == 503 and answer.headers["retry-after"] == "5"
            assert not {b"gone", b"secret value", b"absent"} & set(answer.body.split(b'"'))
            assert answer.json == {"message": "This shape cannot be served as it is defined."}
        with_own = await world.get(shape="failing", where="true", offset="-1")
        assert with_own.status == 400 and not re.search(rb"s\d", with_own.body), "no value of a row is told"
        subset = await world.post({"where": "id = 1"}, shape="failing", log="changes_only")
        assert subset.status == 400 and not re.search(rb"s\d", subset.body)


@pytest.mark.postgres
async def test_a_client_narrows_a_shape_and_never_widens_it(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=1), grants=grants()) as world:
        client = await world.sync(shape="narrow", where='"Odd, Name" > $1', **{"params[1]": "6"}, columns="id,tenant")
        assert {row["id"] for row in client.rows.values()} == {"8", "10", "12"}
        assert set(next(iter(client.rows.values()))) == {"id", "tenant"}
        for clause in ("true", "true OR true", "NOT (tenant = 'a')", "id > 0 OR tenant = 'b'", "tenant = 'b'"):
            found = await world.get(shape="narrow", where=clause, offset="-1")
            assert found.status == 200 and ids(found.items) <= EVEN, clause
        for clause in ("true) OR (true", "true -- ", "(true", "true; SELECT 1", "tenant = $2", "$1 = $1"):
            found = await world.get(shape="narrow", where=clause, offset="-1")
            assert found.status == 400 or ids(found.items) <= EVEN, clause
        wanted = {"secret": "secret = 's1'", "no_such": "no_such = 's1'"}
        said = [
            (await world.get(shape="narrow", where=clause, offset="-1")).json["errors"]["where"][0].replace(name, "x")
            for name, clause in wanted.items()
        ]
        assert said[0] == said[1], "a column that is hidden does not exist"
        for field in ("columns", "queryable_columns"):
            answers = [await world.get(shape="narrow", offset="-1", **{field: f"id,{name}"}) for name in wanted]
            texts = [a.json["errors"][field][0].replace(n, "x") for a, n in zip(answers, wanted, strict=True)]
            assert texts[0] == texts[1]
        subset = {"log": "changes_only", "offset": "now", "shape": "narrow"}
        for clause in ("true", "tenant = 'b' OR true"):
            rows = (await world.post({"where": clause}, **subset)).json["data"]
            assert {row["value"]["id"] for row in rows} == EVEN
        rows = (await world.get(**subset, where="id > 6", subset__where="id < 10")).json["data"]
        assert {row["value"]["id"] for row in rows} == {"8"}
        for body in ({"where": "X = 's2'"}, {"where": "X = true"}, {"order_by": "X", "limit": 1}):
            asked = [{k: str(v).replace("X", name) for k, v in body.items()} for name in wanted]
            answers = [await world.post(each, **subset) for each in asked]
            assert [answer.status for answer in answers] == [400, 400]
            texts = [answer.body.decode().replace(n, "x") for answer, n in zip(answers, wanted, strict=True)]
            assert texts[0] == texts[1] and "does not exist" in texts[0], texts

        # A clause that would fail on a row of another tenant reveals nothing about it: it is not evaluated there.
        failing = await world.sync(shape="narrow", where="1000 / (id - 7) > -1000000")
        assert {row["id"] for row in failing.rows.values()} == EVEN
        assert (await world.post({"where": "1000 / (id - 7) > -1000000"}, **subset)).status == 200
        await world.db.execute("UPDATE item SET kind = 'moved' WHERE id IN (7, 8)")
        await world.db.execute("UPDATE item SET tenant = 'b' WHERE id = 4")
        await world.db.execute(f"UPDATE item SET tenant = '{TENANT.replace(chr(39), chr(39) * 2)}' WHERE id = 9")
        expected = (EVEN - {"4"}) | {"9"}
        await failing.follow_until(lambda: {row["id"] for row in failing.rows.values()} == expected)
        assert not [item for item in failing.seen if item["key"].endswith('"7"')]


@pytest.mark.postgres
async def test_a_shape_of_a_shard_is_narrowed_as_one_of_a_table_is(postgres_dsn: str) -> None:
    columns = (Column("id", "int64"), Column("tenant", "string"), Column("secret", "string"))
    shard = FakeShard("totals", ShardSchema(columns, ("id",)))

    async def opener(name: str) -> FakeShard:
        return shard

    def row(key: int, tenant: str) -> dict[str, object]:
        return {"id": key, "tenant": tenant, "secret": f"s{key}"}

    named = [ServerDefinedShape("sums", "shard.totals", "tenant = $1", ("a",), ("id", "tenant"), narrow=True)]
    given = ShapeAuthorizer(SystemClock(), named)
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=1), shards=opener, grants=given) as world:
        await shard.append(1000, *[(10, 1, row(n, "ab"[n % 2])) for n in range(8)])
        client = await world.sync(shape="sums", where="10 / (id - 3) > -100 OR true")
        assert ids(client.seen) == {"0", "2", "4", "6"}
        changes = ((1500, -1, row(1, "b")), (1500, 1, row(1, "a")), (1500, 1, row(9, "b")), (1500, 1, row(8, "a")))
        await shard.append(2000, *changes)
        await client.follow_until(lambda: "8" in ids(client.seen))
        assert ids(client.seen) == {"0", "1", "2", "4", "6", "8"}
        assert all("secret" not in item["value"] for item in client.seen)
        assert (await world.get(shape="sums", where="secret = 's1'", offset="-1")).status == 400
        assert (await world.get(shape="sums", where="true) OR (true", offset="-1")).status == 400


@given(
    rows=st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(-3, 3)), max_size=30),
    inner=st.sampled_from(
        ["true", "n = 1", "t = 'b' OR n > 0", "10 / n > 1", "NOT (t = 'a')", "n IN (1, 2)", "t IS NULL", "t = $1"]
    ),
    outer=st.sampled_from(["t = $1", "t = $1 AND n <> 0", "t = ANY(ARRAY['a'])"]),
)
def test_both_clauses_hold_and_the_inner_one_is_asked_only_where_the_outer_does(
    rows: list[tuple[str | None, int]], inner: str, outer: str
) -> None:
    types = {"t": Type("text"), "n": Type("int4")}
    first = compile_where(outer, ["a"] if "$1" in outer else [], types)
    second = compile_where(inner, ["a"] if "$1" in inner else [], types, first_param=len(first.params) + 1)
    joined = combine(first, second)
    assert joined.params == (*first.params, *second.params)
    assert ("CASE WHEN" in joined.sql) == second.may_fail, "PostgreSQL asks the clauses of an AND in any order"
    for t, n in rows:
        row = {"t": t, "n": str(n)}
        if not first.matches(row):
            assert not joined.matches(row), "whatever the inner clause does with it"
        elif not (inner.startswith("10 / n") and n == 0):
            assert joined.matches(row) == second.matches(row)


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=5))
def test_a_list_of_a_token_is_an_array_of_exactly_its_values(values: list[str]) -> None:
    text = claim_text(values)
    assert text is not None and read_array(text, str) == values


def test_a_claim_that_is_no_value_denies() -> None:
    shape = ServerDefinedShape("mine", "item", "tenant = $1", (FromClaim("tenant"),))
    for value in (None, {}, {"a": 1}, float("nan"), "zero\0byte", [None], [[1]], [{"a": 1}]):
        with pytest.raises(AccessDeniedError) as denied:
            shape.bind_params({"tenant": value}, ())
        assert denied.value.status == 403
    for claims, status in ((None, 401), ({}, 403)):
        with pytest.raises(AccessDeniedError) as denied:
            shape.bind_params(claims, ())
        assert denied.value.status == status
    for value, text in (("", ""), (7, "7"), (True, "true"), (1.5, "1.5"), ([], "{}"), (["a", 1], '{"a","1"}')):
        assert shape.bind_params({"tenant": value}, ()) == (text,)


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (ServerDefinedShape("a", "item", "tenant = "), "shape.a.where"),
        (ServerDefinedShape("a", "item", "tenant = $1"), "shape.a.params"),
        (ServerDefinedShape("a", "item", "tenant = $1", ("x", "y")), "shape.a.params"),
        (ServerDefinedShape("a", "item", "tenant = '$1'", ("x",)), "shape.a.params"),
        (ServerDefinedShape("a", "item", "", ("x",)), "shape.a.params"),
        (ServerDefinedShape("a", "a.b.c"), "shape.a.table"),
        (ServerDefinedShape("a", "item", "true) OR (true"), "shape.a.where"),
    ],
)
def test_a_definition_that_could_never_be_served_is_refused_when_the_node_starts(
    shape: ServerDefinedShape, named: str
) -> None:
    with pytest.raises(InvalidError, match=named):
        ShapeAuthorizer(SystemClock(), [shape])


def test_the_whole_query_is_looked_at_once() -> None:
    """Readers may interpret a repeated name in a query differently."""
    from starlette.datastructures import QueryParams

    from tidemill.shapes.http.params import BadRequestError

    for query in ("shape=narrow&where=true&where=tenant='b'", "shape=narrow&params[1]=a&params[1]=b&where=id=$1"):
        with pytest.raises(BadRequestError):
            grants().authorize(QueryParams(query), None)
    assert grants().requested_table(QueryParams(urlencode({"shape": "kinds", "table": "other"}))) == "public.item"
