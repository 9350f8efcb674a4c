"""Routes of the console over HTTP: the API, its limits, the page's files and configured pages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from support.console.reports import shop
from support.console.world import Console, console
from support.waiting import eventually
from tidemill.base.config.config import parse
from tidemill.base.errors import InvalidError
from tidemill.console import cluster_reader, shared_answer
from tidemill.console.shared_answer import SHARED_NAMES_MAX
from tidemill.shards.registry import read_shard

ORDERS = 137


@pytest.fixture(scope="module")
def served() -> Iterator[Console]:
    with console() as found:
        found.call(found.append_orders(1, ORDERS))
        found.call(found.append_letters(40))
        yield found


def get(served: Console, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    try:
        with urlopen(Request(served.url + path, headers=headers), timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except HTTPError as error:
        return error.code, dict(error.headers), error.read()


def read(served: Console, path: str) -> Any:
    status, _, body = get(served, path)
    assert status == 200, body
    return json.loads(body)


def refusal(served: Console, path: str) -> tuple[int, str]:
    status, _, body = get(served, path)
    return status, json.loads(body)["message"]


def test_the_overview_names_the_node_and_has_every_part_of_the_page(served: Console) -> None:
    found = read(served, "/api/overview")
    assert found["node"] == "harbour"
    assert [column["name"] for column in found["flow"]["columns"]] == [
        "sources", "topics", "pipelines", "tables", "clients"
    ]  # fmt: skip
    assert found["dead_letters"] == [{"pipeline": "shop", "table": "shop.dead_letters", "count": 17}]
    assert found["captures"][0]["capture"] == "shop"
    assert found["latency"]["capture/shop"]["appended"]["count"] == 3


def test_why_is_the_verdict_of_the_command_line(served: Console) -> None:
    found = read(served, "/api/why?name=orders")
    assert [stage["name"] for stage in found["chain"]] == ["shard:orders", "capture:shop/topics", "capture:shop"]
    assert (found["state"], found["exit"]) == ("moving", 0)
    assert refusal(served, "/api/why?name=nothing")[0] == 404


def test_why_of_a_captured_table_that_no_pipeline_maintains_has_the_note_of_the_command_line(served: Console) -> None:
    found = read(served, "/api/why?name=note")
    assert [stage["name"] for stage in found["chain"]] == ["capture:shop/topics", "capture:shop"]
    assert found["note"] == (
        "public.note is captured by shop into topic shop.public.note; no pipeline maintains it. To maintain it as a"
        ' table, add to a pipeline: p.table("note", p.capture("shop").table("public.note"))'
    )
    found = read(served, "/api/why?name=public.orders")
    assert found["chain"][0]["name"] == "shard:orders"
    assert found["note"] == "public.orders is maintained as table orders by pipeline shop."
    status, message = refusal(served, "/api/why?name=audit")
    assert (status, message) == (
        404,
        "the table is refused: capture=shop table=public.audit reason: The table has no primary key."
        " Add one, or exclude it from capture.shop.tables.",
    )


def test_a_place_has_each_part_of_the_view_of_a_table_and_is_never_missing(served: Console) -> None:
    def parts(name: str) -> tuple[bool, bool, bool, int, list[str]]:
        found = read(served, f"/api/place?name={name}")
        place, table, why = (found[part] is not None for part in ("place", "table", "why"))
        return place, table, why, len(found["captured"]), found["maintained_as"]

    assert parts("orders") == (True, True, True, 1, ["orders"])
    assert parts("payment") == (True, False, True, 1, ["payment"])  # declared, and not created yet
    assert parts("public.orders") == (False, False, True, 1, ["orders"])
    assert parts("public.note") == (False, False, True, 1, [])
    assert parts("nothing") == (False, False, False, 0, [])
    assert read(served, "/api/place?name=note")["note"] == read(served, "/api/why?name=note")["note"]
    table = read(served, "/api/place?name=orders")["table"]
    assert table.keys() == read(served, "/api/tables/orders").keys()


def test_a_topic_without_a_record_is_empty_until_its_first_one() -> None:
    def state(served: Console) -> str:
        columns = read(served, "/api/overview")["flow"]["columns"]
        return str(next(node["state"] for node in columns[1]["nodes"] if node["name"] == "topic:returns"))

    async def write(served: Console) -> None:
        consensus = served.node.stores.consensus
        await consensus.fence("topic/t3/0", 1)
        await consensus.append("topic/t3/0", 1, 0, [b"a batch"], "n1")

    with console() as served:
        assert state(served) == "empty"
        served.call(write(served))
        eventually(lambda: state(served) == "unused", "the topic has a record", pause_s=0.2)


def test_lists_have_pages_and_the_number_of_all_rows(served: Console) -> None:
    status, headers, body = get(served, "/api/captures?capture=shop&limit=2&offset=7")
    assert (status, headers["x-total-count"]) == (200, "10")
    assert [row["table"] for row in json.loads(body)] == ["public.history", "public.audit"]
    assert read(served, "/api/captures?capture=other") == []
    assert [row["shard"] for row in read(served, "/api/tables")] == ["orders", "shop.dead_letters"]
    assert refusal(served, "/api/tables?limit=many")[0] == 400


def test_a_table_is_described_as_by_the_command_line(served: Console) -> None:
    found = read(served, "/api/tables/orders")
    assert found["columns"] == {"id": "int64", "status": "string", "total": "decimal(12,2)"}
    assert (found["key"], found["updates"]) == (["id"], ORDERS)
    assert refusal(served, "/api/tables/nothing") == (404, "no such table: table=nothing. See /api/tables.")


def test_rows_are_text_sorted_by_the_key_at_a_chosen_time(served: Console) -> None:
    before = read(served, "/api/rows?table=orders&limit=2")
    assert before["rows"] == [["1", "paid", "1.25"], ["2", None, "2.50"]]
    assert before["total"] == ORDERS
    served.call(served.append_orders(10_000, 1))
    assert read(served, "/api/rows?table=orders")["total"] == ORDERS + 1
    assert read(served, f"/api/rows?table=orders&as_of={before['as_of_ms']}")["total"] == ORDERS


def test_a_large_table_shows_some_rows_and_no_number(served: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.console.row_sample.WHOLE_ROWS", 10)
    monkeypatch.setattr("tidemill.console.row_sample.RANGE_ROWS", 30)
    found = read(served, "/api/rows?table=orders")
    assert found["total"] is None
    assert 0 < len(found["rows"]) < ORDERS


def test_a_read_of_too_many_bytes_is_refused(served: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.console.row_sample.READ_BYTES_MAX", -1)
    served.call(served.append_orders(20_000, 5_000))  # large enough to be an object
    status, message = refusal(served, "/api/rows?table=orders")
    assert (status, "too many parts" in message) == (400, True)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/rows", 400),
        ("/api/rows?table=nothing", 404),
        ("/api/rows?table=orders&table=other", 400),
        ("/api/rows?table=orders&as_of=yesterday", 400),
        ("/api/rows?table=orders&as_of=9999999999999", 503),
        ("/api/dead-letters?table=orders", 404),
        (f"/api/tables/{'x' * 301}", 400),
    ],
)
def test_a_bad_request_is_refused_with_a_sentence(served: Console, path: str, status: int) -> None:
    found, message = refusal(served, path)
    assert (found, message.endswith(".")) == (status, True), message


def test_dead_letters_have_reasons_and_the_newest_records(served: Console) -> None:
    found = read(served, "/api/dead-letters?table=shop.dead_letters&limit=3")
    assert (found["total"], found["examined"], len(found["records"])) == (40, 40, 3)
    assert [(row["count"], row["topic"]) for row in found["reasons"]] == [(26, "clicks"), (14, "clicks")]
    assert found["records"][-1]["bytes"] == '{"click_id": broken'


def test_several_open_pages_share_one_computation_and_nothing_runs_without_one(served: Console) -> None:
    with ThreadPoolExecutor(8) as pool:
        read(served, "/api/overview")
        before = served.node.reads
        answers = list(pool.map(lambda _: read(served, "/api/overview")["at_ms"], range(40)))
        assert served.node.reads - before <= 1 + len(set(answers))
        assert len(set(answers)) < 20
    quiet = served.node.reads
    began_s = served.node.clock.monotonic_s()
    eventually(lambda: served.node.clock.monotonic_s() - began_s > 1.5, "a second without a page", pause_s=0.1)
    assert served.node.reads == quiet


def test_two_open_views_of_a_table_share_one_reading_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []

    async def counted(consensus: Any, name: str) -> Any:
        loads.append(name)
        return await read_shard(consensus, name)

    monkeypatch.setattr(cluster_reader, "read_shard", counted)
    monkeypatch.setattr(cluster_reader, "TABLE_VALID_S", 3_600.0)  # until the test has ended
    monkeypatch.setattr(shared_answer, "VALID_S_MAX", 3_600.0)
    with console() as served:
        served.call(served.append_orders(1, 3))
        with ThreadPoolExecutor(2) as views:
            found = list(views.map(lambda _: read(served, "/api/place?name=orders")["table"]["updates"], range(6)))
        assert read(served, "/api/tables/orders")["updates"] == 3
        assert (found, loads) == ([3] * 6, ["orders"])
        for n in range(SHARED_NAMES_MAX):
            assert read(served, f"/api/place?name=other-{n}")["table"] is None
        read(served, "/api/place?name=orders")
        assert loads.count("orders") == 2, "it was the least recently requested one"


def test_an_answer_is_compressed_only_for_a_client_that_accepts_it(served: Console) -> None:
    status, headers, body = get(served, "/api/overview", **{"accept-encoding": "gzip"})
    assert (status, headers["content-encoding"]) == (200, "gzip")
    assert json.loads(gzip.decompress(body))["node"] == "harbour"
    assert "content-encoding" not in get(served, "/api/overview")[1]


def test_the_page_permits_only_its_own_scripts(served: Console) -> None:
    for path in ("/", "/console/app.js", "/console/views/flow.js", "/console/vendor/preact.mjs"):
        status, headers, _ = get(served, path)
        assert status == 200, path
        assert headers["content-security-policy"].startswith("default-src 'self';"), path
        assert headers["cache-control"] == "no-cache"
    assert get(served, "/demo/")[0] == 404


def test_the_page_has_no_inline_script_or_style_and_names_no_other_origin() -> None:
    static = Path(__file__).parents[2] / "src/tidemill/console/static"
    html = (static / "index.html").read_text()
    assert "<style" not in html
    assert "<script>" not in html
    for path in [*static.glob("*.*"), *static.glob("views/*.js")]:
        assert "https://" not in path.read_text(), path.name


def test_without_stores_the_page_works_and_rows_wait() -> None:
    with console() as served:
        served.node.stores = None
        assert read(served, "/api/overview")["problems"] == []
        assert refusal(served, "/api/rows?table=orders")[0] == 503
        assert refusal(served, "/api/tables")[0] == 503


def test_an_error_of_consensus_is_a_sentence_and_is_shared_too() -> None:
    with console() as served:
        served.node.silent = True
        before = served.node.reads
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: refusal(served, "/api/overview"), range(8)))
        assert set(found) == {(503, "consensus does not answer: waited_s=2.")}
        assert served.node.reads - before < 8


def test_rows_need_the_secret_of_shapes_where_there_is_one() -> None:
    with console(shapes={"secret": "quay-side"}) as served:
        served.call(served.append_orders(1, 3))
        assert refusal(served, "/api/rows?table=orders") == (401, "Rows need the secret of shapes (shapes.secret).")
        assert get(served, "/api/rows?table=orders&secret=other")[0] == 401
        assert get(served, "/api/dead-letters?table=shop.dead_letters")[0] == 401
        assert get(served, "/api/rows?table=orders", **{"x-tidemill-secret": "quay-side"})[0] == 200
        assert get(served, "/api/overview")[0] == 200


def test_a_configured_directory_is_served_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<p>harbour</p>")
    with console(shop, http={"pages": {"demo": str(tmp_path)}}) as served:
        assert get(served, "/demo/")[2] == b"<p>harbour</p>"
        assert get(served, "/demo")[2] == b"<p>harbour</p>"
        assert get(served, "/demo/../secret")[0] == 404


@pytest.mark.parametrize(("name", "directory"), [("api", "x"), ("v1", "x"), ("a/b", "x"), ("demo", "")])
def test_a_page_cannot_take_a_path_of_the_node(name: str, directory: str) -> None:
    with pytest.raises(InvalidError, match=r"http\.pages"):
        parse({"http": {"pages": {name: directory}}}, origin="")


def test_directories_of_pages_are_relative_to_the_configuration() -> None:
    config = parse({"http": {"pages": {"shop": "page"}}}, origin="/etc/tidemill/tidemill.toml")
    assert config.http.pages == {"shop": "/etc/tidemill/page"}
