"""The page of a node in Chromium: every view in a wide and a narrow window, its keyboard, its limits, and blindness."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.console.browser import NARROW, WIDE, ScriptClock, Watched, chromium, processor_slowness, watched
from support.console.reports import large, large_rows, pipelines, shop
from support.console.running import shop_cluster
from support.console.world import Console, Rows, console
from support.waiting import eventually

pytestmark = pytest.mark.browser

SCRIPT_S = 0.2
"""Limit of the processor time for scripts to draw the first overview, or a list, of a large cluster."""

VIEWS = {
    "": "no records yet",
    "tables": "Tables",
    "tables/orders": re.compile(r"[\d,]+ rows, the first 100, by id"),  # other tests append some
    "tables/orders/live": "Following.",
    "tables/orders/schema": "decimal(12,2)",
    "tables/orders/latency": "From the commit to this table",
    "tables/orders/use": "PySpark",
    "tables/payment": "Not created yet",
    "tables/public.note": 'p.table("note", p.capture("shop").table("public.note"))',
    "tables/public.note/use": "/v1/shape?table=public.note&offset=-1",
    "tables/public.orders": "Maintained as orders",
    "tables/unknown": "There is no table unknown.",
    "captures": "tidemill_shop",
    "captures/shop": "Its tables",
    "dead-letters": "shop.dead_letters",
    "dead-letters/shop.dead_letters": "no id",
    "processes": "pipeline:shop",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def served() -> Iterator[Console]:
    with console() as found:
        found.call(found.append_orders(1, 137))
        found.call(found.append_letters(40))
        yield found


RUNNING = {
    "": "no records yet",
    "tables": "written by programs",
    "tables/stock": "2 rows, by k",
    "tables/stock/live": "Following.",
    "tables/stock/schema": "int32",
    "tables/stock/latency": "Programs write this table",
    "tables/stock/use": 'load_table(("tidemill", "stock"))',
    "tables/orders": "Not created yet",
    "tables/public.item": 'p.table("item", p.capture(',
    "tables/public.item/schema": "key 1",
    "tables/unknown": "There is no table unknown.",
    "captures": "WAL kept by the slot",
    "dead-letters": "shop.dead_letters",
    "dead-letters/shop.dead_letters": "There are no dead letters.",
    "processes": "node:n1",
}
"""Views of a cluster without Spark."""

PICTURES = {"": "overview", "tables": "tables", "tables/orders": "table", "captures/shop": "capture"}
"""Views of which the documentation has pictures."""
PICTURES_VARIABLE = "TIDEMILL_SCREENSHOTS"
"""Set it to write them into docs/images."""


def shows(seen: Watched, text: str | re.Pattern[str]) -> None:
    from playwright.sync_api import expect

    expect(seen.page.locator("#page")).to_contain_text(text)


@pytest.mark.parametrize(
    ("size", "scheme"), [(WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")], ids=str
)
def test_every_view_is_readable_and_without_an_error(
    browser: Any, served: Console, size: tuple[int, int], scheme: str, tmp_path: Path
) -> None:
    with watched(browser, served.url, size, scheme) as seen:
        for view, text in VIEWS.items():
            seen.open(view)
            shows(seen, text)
            seen.check()
            seen.shoot(tmp_path, view.replace("/", "-") or "overview")


@pytest.mark.postgres
def test_every_view_of_a_running_cluster_is_without_an_error(browser: Any, tmp_path: Path, postgres_dsn: str) -> None:
    """A real node with a captured table, a table of a program, a declared table and a topic without records."""
    with shop_cluster(tmp_path, postgres_dsn) as node:
        for size, scheme in ((WIDE, "light"), (NARROW, "dark")):
            with watched(browser, f"http://{node.http}", size, scheme) as seen:
                for view, text in RUNNING.items():
                    seen.open(view)
                    shows(seen, text)
                    seen.check()
                seen.open("tables/public.item/live")
                shows(seen, "Following. 0 changes")
                eventually(lambda: inserted_and_shown(seen, postgres_dsn), "a change is shown", pause_s=0.3)
                seen.check()


def inserted_and_shown(seen: Watched, dsn: str) -> bool:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO item SELECT max(id) + 1, 'new' FROM item")
    return bool(seen.page.locator("table[aria-label=Changes] tbody tr").count())


def take_pictures(browser: Any, served: Console) -> None:
    images = Path(__file__).parents[2] / "docs/images"
    images.mkdir(exist_ok=True)
    for size, scheme, name in ((WIDE, "light", ""), (WIDE, "dark", "-dark"), (NARROW, "light", "-narrow")):
        with watched(browser, served.url, size, scheme) as seen:
            for view, title in PICTURES.items():
                if name and view:
                    continue
                seen.open(view)
                shows(seen, "137 rows" if title == "table" else VIEWS[view])
                seen.page.wait_for_timeout(1_000)
                seen.page.screenshot(path=str(images / f"console-{title}{name}.png"))


if PICTURES_VARIABLE in os.environ:  # not skipped: in CI a skipped test of a browser is a failure

    def test_pictures_for_the_documentation(browser: Any) -> None:
        with console() as served:
            tables = dict.fromkeys(("orders", *pipelines()[0].tables))
            for number, table in enumerate(tables):
                served.call(served.append_orders(1, 137 + 2_111 * number, table))
            take_pictures(browser, served)


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (NARROW, "dark")], ids=str)
def test_a_killed_driver_is_shown_with_its_sentence_its_holder_and_what_it_holds_up(
    browser: Any, size: tuple[int, int], scheme: str
) -> None:
    with (
        console(lambda now_ms: shop(now_ms, killed_s=12)) as served,
        watched(browser, served.url, size, scheme) as seen,
    ):
        seen.open("")
        shows(seen, "The driver of pipeline shop has not reported for 12 s: it is stopped, disconnected or dead.")
        shows(seen, "pid 4712 on quay")
        shows(seen, "tidemill why process:pipeline:shop")
        shows(seen, "table orders")
        seen.check()
        seen.open("tables/orders")
        shows(seen, "process:pipeline:shop")


def test_a_driver_that_is_back_after_a_kill_is_shown_as_restarted(browser: Any) -> None:
    restarts = {"killed_s": 5.0, "restarted_s": 4.0}  # the last report of the driver is older than its end
    with console(lambda now_ms: shop(now_ms, **restarts)) as served, watched(browser, served.url) as seen:
        seen.open("")
        shows(seen, re.compile(r"The driver of pipeline shop ended \d+\.\d s ago and is being restarted: .*SIGKILL"))
        restarts["killed_s"] = 0.0
        shows(seen, re.compile(r"The driver of pipeline shop was restarted \d+\.\d s ago: .*SIGKILL; restart 2"))
        seen.check()


def test_changes_arrive_in_the_live_view_and_stop_with_pause(browser: Any, served: Console) -> None:
    from playwright.sync_api import expect

    with watched(browser, served.url) as seen, seen.page.expect_response(lambda got: "live=true" in got.url):
        seen.open("tables/orders/live")
        shows(seen, "Following. 0 changes")
        eventually(lambda: appended_and_shown(seen, served), "a change is shown")
        seen.page.get_by_role("button", name="Pause").click()
        shows(seen, "Paused.")
        expect(seen.page.get_by_role("button", name="Follow")).to_be_visible()
        seen.check()


def test_of_very_many_changes_only_the_newest_are_shown_and_the_view_says_so(browser: Any, served: Console) -> None:
    from playwright.sync_api import expect

    with watched(browser, served.url) as seen, seen.page.expect_response(lambda got: "live=true" in got.url):
        seen.open("tables/orders/live")
        shows(seen, "Following. 0 changes")
        eventually(lambda: appended_and_shown(seen, served), "a change is shown")
        served.call(served.append_orders(5_000_000, 5_000))
        shows(seen, re.compile(r"5,\d\d\d changes since this view was opened: the newest 100 are shown"))
        expect(seen.page.locator("table[aria-label=Changes] tbody tr")).to_have_count(100)
        expect(seen.page.locator("table[aria-label=Changes] tbody tr").first).to_contain_text("5004999")
        seen.check()


def appended_and_shown(seen: Watched, served: Console) -> bool:
    served.call(served.append_orders(served.served + 1_000, 1))
    seen.page.wait_for_timeout(500)
    return bool(seen.page.locator("table[aria-label=Changes] tbody tr").count())


def test_rows_can_be_read_at_an_earlier_time(browser: Any, served: Console) -> None:
    with watched(browser, served.url) as seen:
        seen.open("tables/orders")
        shows(seen, "the first 100, by id")
        before = seen.page.locator("input[name=as_of]").input_value()

        def count() -> str:
            return str(seen.page.locator("#tab-panel p.quiet").inner_text()).partition(" rows")[0]

        earlier = count()
        served.call(served.append_orders(1_000_000 + served.served, 3))
        seen.page.get_by_role("button", name="Newest").click()
        eventually(lambda: seen.page.locator("input[name=as_of]").input_value() != before, "a newer time")
        eventually(lambda: count() != earlier, "three more rows")
        seen.page.locator("input[name=as_of]").fill(before)
        seen.page.get_by_role("button", name="Read").click()
        eventually(lambda: count() == earlier, "an earlier time")
        seen.check()


def test_of_a_large_table_some_rows_are_shown_and_the_view_says_so(
    browser: Any, served: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.console.row_sample.WHOLE_ROWS", 10)
    with watched(browser, served.url) as seen:
        seen.open("tables/orders")
        shows(seen, re.compile(r"100 rows of a table of [\d,]+ updates, in no order, .* It is too large to be read"))
        seen.check()


def test_the_page_works_with_the_keyboard_alone(browser: Any, served: Console) -> None:
    from playwright.sync_api import expect

    with watched(browser, served.url) as seen:
        page = seen.page
        seen.open("")
        shows(seen, "Flow")
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_be_focused()
        page.get_by_role("link", name="Tables", exact=True).focus()
        page.keyboard.press("Enter")
        shows(seen, "late ones first")
        page.keyboard.press("/")
        expect(page.locator("input[type=search]")).to_be_focused()
        page.keyboard.type("order_l")
        expect(page.locator("table.rows tbody tr")).to_have_count(2)  # the table, and the one derived from it
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="order_line")).to_be_visible()
        seen.open("tables/orders")
        page.get_by_role("tab", name="Rows").focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name="Live")).to_be_focused()
        expect(page.get_by_role("tab", name="Live")).to_have_attribute("aria-selected", "true")
        page.keyboard.press("ArrowLeft")
        expect(page.get_by_role("tab", name="Rows")).to_be_focused()
        outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"


def test_a_page_without_an_answer_for_three_seconds_dims_and_says_so_and_recovers(browser: Any) -> None:
    from playwright.sync_api import expect

    with console() as served, watched(browser, served.url) as seen:
        seen.open("")
        shows(seen, "Every stage advances")
        expect(seen.page.locator("[role=alert]")).to_have_count(0)
        served.node.silent = True
        expect(seen.page.locator("[role=alert]")).to_contain_text("has not answered for")
        assert seen.page.locator("main").get_attribute("class") == "blind-page"
        shows(seen, "consensus does not answer")
        shows(seen, "Every stage advances")  # what it last knew
        first = seen.page.locator(".heard").inner_text()
        eventually(lambda: seen.page.locator(".heard").inner_text() != first, "the age ticks")
        served.node.silent = False
        expect(seen.page.locator("[role=alert]")).to_have_count(0)


def test_a_node_that_is_gone_is_blindness_too(browser: Any) -> None:
    from playwright.sync_api import expect

    with console() as served, watched(browser, served.url) as seen:
        seen.open("")
        shows(seen, "Every stage advances")
        port = served.server.port
        served.call(served.server.aclose())
        expect(seen.page.locator("[role=alert]")).to_contain_text("has not answered for")
        served.call(served.serve(port))
        expect(seen.page.locator("[role=alert]")).to_have_count(0)


def test_a_page_that_nobody_sees_asks_nothing(browser: Any) -> None:
    with console() as served, watched(browser, served.url) as seen:
        seen.open("")
        shows(seen, "Every stage advances")
        hidden = "Object.defineProperty(document, 'hidden', { configurable: true, get: () => true })"
        seen.page.evaluate(hidden)
        seen.page.wait_for_timeout(1_500)
        before = served.served
        seen.page.wait_for_timeout(2_500)
        assert served.served == before


@pytest.mark.parametrize("view", ["", "tables"])
def test_a_thousand_tables_and_2600_partitions_need_little_of_the_browser(browser: Any, view: str) -> None:
    rows, topics = large_rows()
    with console(large, Rows(rows, topics)) as served, watched(browser, served.url) as seen:
        seen.page.goto("about:blank")
        clock = ScriptClock(seen.page)
        seen.open(view)
        shows(seen, "1,000 tables" if view else "989 others")
        seen.page.wait_for_timeout(1_000)
        assert clock.read_s() < SCRIPT_S * processor_slowness()
        seen.check()


def test_rows_behind_a_secret_ask_for_it(browser: Any) -> None:
    with console(shapes={"secret": "quay-side"}) as served, watched(browser, served.url) as seen:
        served.call(served.append_orders(1, 3))
        seen.open("tables/orders")
        shows(seen, "Rows of tables need the secret of shapes")
        seen.open("dead-letters/shop.dead_letters")
        shows(seen, "Rows of tables need the secret of shapes")
        seen.open("tables/orders")
        seen.check()
        seen.page.locator("input[name=secret]").fill("quay-side")
        seen.page.get_by_role("button", name="Use it").click()
        shows(seen, "3 rows, by id")
        seen.check()
