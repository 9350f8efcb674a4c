"""The whole system, end to end: Harbour Shop through the real command, by its own report and in a real browser.

Rates are below the demo's defaults: these tests share two cores with the rest of the suite.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.console.browser import NARROW, WIDE, chromium, watched
from support.e2e.demo import TABLES, ports, wait_until_ready
from support.objects.moto_access import start_server
from support.postgres import EmbeddedPostgres
from support.waiting import DEADLINE_S, slowness

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
LIGHT = ["--rate", "40", "--clicks", "200"]
STUCK_AFTER_S = 60.0
"""Seconds for which a stage may be stuck on an idle machine. One that stays stuck never drains, which fails as well."""

VIEWS = {
    "": "Where the time goes",
    "tables": "conversion_by_product",
    "tables/orders": "from public.orders of shop",
    "tables/orders/live": "Following.",
    "tables/orders/schema": "key 1",
    "tables/orders/latency": "From the commit to this table",
    "tables/orders/use": "PySpark",
    "tables/public.orders": "Maintained as orders",
    "captures": "WAL kept by the slot",
    "captures/shop": "Its tables",
    "dead-letters/shop.dead_letters": "Reasons",
    "processes": "pipeline:shop",
}


@contextmanager
def demo(directory: Path, *options: str, nodes: int = 1, environ: dict[str, str] | None = None) -> Iterator[Any]:
    http, kafka = ports(nodes)
    command = [sys.executable, "-m", "demo", "--json", "--data", str(directory), "--http", http]
    command += ["--kafka", kafka, "--nodes", str(nodes), *LIGHT, *options]
    command += ["--stuck-after", f"{STUCK_AFTER_S * slowness():.0f}"]
    path = directory.parent / "demo.log"
    with path.open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env={**os.environ, **(environ or {})}
        )
        try:
            yield process, http
        except BaseException as error:
            error.add_note(path.read_text()[-4000:])
            raise
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(DEADLINE_S)


def report_of(process: subprocess.Popen[str], directory: Path) -> dict[str, Any]:
    output, _ = process.communicate(timeout=900)
    log = (directory.parent / "demo.log").read_text()[-4000:]
    assert output.strip(), log
    report = json.loads(output.strip().splitlines()[-1])
    assert process.returncode == 0, (report["stuck"], report, log)
    return report


def check(report: dict[str, Any]) -> None:
    assert report["verify"].keys() == TABLES
    for table, counts in report["verify"].items():
        assert counts["rows"] > 0, table
        assert (counts["missing"], counts["extra"], counts["different"]) == (0, 0, 0), table
    assert report["stuck"] == []
    assert report["dead_letters"] == report["malformed"]
    assert report["money_unequal"] == 0
    assert report["commit_to_client_ms"]["samples"] > 0
    assert report["commit_to_shard_ms"]["samples"] > 0
    assert report["spark"].startswith("4.3.")


@pytest.mark.browser
def test_killing_node_and_driver_in_turn_changes_nothing_and_a_second_run_resumes_with_a_page_that_follows_both_shapes(
    tmp_path: Path,
) -> None:
    """The money is equal in all three places: PostgreSQL, its shard and the page."""
    directory = tmp_path / "demo"
    # A crash is followed by the next one when everything works again, which takes longer on a busy machine.
    with demo(directory, "--for", f"{60 * min(1.5, slowness()):.0f}", "--crash") as (process, _):
        first = report_of(process, directory)
    check(first)
    assert first["crashes"] >= 4
    # Ctrl-C comes once the whole page was seen: the load ends, and the demo still drains and verifies.
    with demo(directory, "--for", "400") as (process, http), chromium() as browser:
        wait_until_ready(http)
        look_at_the_page(browser, http, tmp_path / "page.png")
        look_at_the_console(browser, http)
        process.send_signal(signal.SIGINT)
        second = report_of(process, directory)
    check(second)
    assert second["verify"]["clicks"]["rows"] > first["verify"]["clicks"]["rows"]
    assert second["verify"]["payment"]["rows"] > first["verify"]["payment"]["rows"]


def look_at_the_page(browser: Any, http: str, screenshot: Path) -> None:
    from playwright.sync_api import expect

    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"http://{http}/demo/")
    expect(page.locator("#orders tr").first).to_be_visible(timeout=60_000)
    expect(page.locator("#conversion tr").first).to_be_visible(timeout=300_000)
    expect(page.locator("#strip")).to_have_class("strip equal", timeout=60_000)
    read = "() => ['postgres', 'shard', 'browser'].map(p => document.getElementById('money-' + p).textContent)"
    money = page.evaluate(read)
    assert len(set(money)) == 1 and float(money[0]) > 0
    expect(page.locator("#marks tr", has_text="capture:shop").first).to_be_visible()
    page.screenshot(path=str(screenshot))
    assert errors == []
    page.close()


def look_at_the_console(browser: Any, http: str) -> None:
    """Look at every view of the page of the demo's cluster, in both sizes; each is loaded once."""
    from playwright.sync_api import expect

    with watched(browser, f"http://{http}", WIDE, "dark") as seen:
        for view, text in VIEWS.items():
            seen.open(view)
            expect(seen.page.locator("main")).to_contain_text(text)
            for (width, height), scheme in ((NARROW, "light"), (WIDE, "dark")):
                seen.page.set_viewport_size({"width": width, "height": height})
                seen.page.emulate_media(color_scheme=scheme)
                seen.check()


@pytest.mark.extended
def test_two_nodes_on_postgres_consensus_and_an_s3_bucket(tmp_path: Path) -> None:
    server = start_server()
    host, port = server.get_host_and_port()
    environ = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    directory = tmp_path / "demo"
    try:
        create_bucket(f"http://{host}:{port}")
        with EmbeddedPostgres(tmp_path / "consensus") as consensus:
            objects = f"s3://harbour/e2e?endpoint=http://{host}:{port}&region=us-east-1"
            options = ("--for", "20", "--objects", objects, "--consensus", consensus.dsn)
            with demo(directory, *options, nodes=2, environ=environ) as (process, _):
                report = report_of(process, directory)
            with psycopg.connect(consensus.dsn) as connection:
                tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'tidemill'"
                assert connection.execute(tables).fetchone() != (0,)
    finally:
        server.stop()
    check(report)
    assert not (directory / "consensus.db").exists()
    assert not (directory / "objects").exists()


def create_bucket(endpoint: str) -> None:
    from urllib.request import Request, urlopen

    with urlopen(Request(f"{endpoint}/harbour", method="PUT")) as answer:
        assert answer.status == 200
