"""`--watch`: it outlives an outage of the cluster, and opens its stores once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.cli.cluster import Cluster
from support.cli.process import run_tidemill
from tidemill.base.errors import ClosedError, UnavailableError
from tidemill.base.status.status import StageStatus, StatusReport
from tidemill.cli import context
from tidemill.cli.cluster import status, why
from tidemill.cli.context import OpenConsensus, OpenStores, open_stores
from tidemill.metastore.catalogue import CaptureTableRow

REPORT = StatusReport("node:n1", 1, (StageStatus("capture:shop/topics", 1, 1), StageStatus("node:n1", 1, 1)))
"""The report of a node that has been silent for a long time."""
AWAY = UnavailableError(
    "no process of the cluster is running.", fix="Start one: tidemill up. It reports after some seconds."
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(status, "WATCH_INTERVAL_S", 0)
    cluster = Cluster(tmp_path)
    with open_stores(cluster.config) as opened:
        row = CaptureTableRow("shop", "public.orders", "shop.public.orders")
        opened.portal.call(opened.catalogue.change_table(row.capture, row.table, lambda _: row))
    return tmp_path


def turns(monkeypatch: pytest.MonkeyPatch, *outcomes: BaseException | None) -> list[int]:
    """Let each turn read a report, or fail; Ctrl-C follows the last one. Return the connections that turns use."""
    used: list[int] = []
    each = iter((*outcomes, KeyboardInterrupt()))

    def read_reports(opened: OpenConsensus) -> list[StatusReport]:
        used.append(id(opened.consensus))
        if (outcome := next(each)) is not None:
            raise outcome
        return [REPORT]

    monkeypatch.setattr(status, "read_reports", read_reports)
    return used


@pytest.mark.parametrize("command", ["status", "why"])
def test_an_outage_is_reported_and_watched_until_ctrl_c(
    directory: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    turns(monkeypatch, None, AWAY, None)
    done = run_tidemill(f"{command} --watch", cwd=directory)
    assert done.exit_code == 130
    assert done.errors == f"{AWAY} This command continues to watch; Ctrl-C ends it.\n"
    assert done.output.count("in trouble" if command == "status" else "blocked by") == 2


def test_a_connection_that_closed_is_opened_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[OpenConsensus] = []
    opening = status.open_consensus_only

    @contextmanager
    def counted(config: Path | None, within_s: float) -> Iterator[OpenConsensus]:
        if len(opened) == 1:  # the first attempt to open it again
            opened.append(opened[0])
            raise UnavailableError("consensus does not answer.")
        with opening(config, within_s) as found:
            opened.append(found)
            yield found

    monkeypatch.setattr(status, "open_consensus_only", counted)
    turns(monkeypatch, None, ClosedError("consensus was closed."), None)
    done = run_tidemill("status --watch", cwd=directory)
    assert done.exit_code == 130
    assert [line.partition(" This")[0] for line in done.errors.splitlines()] == [
        "consensus was closed.", "consensus does not answer."
    ]  # fmt: skip
    assert done.output.count("live clients") == 2
    assert len({id(each) for each in opened}) == 2


def test_what_is_wrong_at_the_beginning_ends_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns(monkeypatch, None)
    done = run_tidemill("why nothing --watch", cwd=directory)
    assert (done.exit_code, "no such stage or table: name='nothing'" in done.errors) == (2, True)
    assert run_tidemill("status --watch -c nope.toml", cwd=directory).exit_code == 2


def test_why_opens_the_stores_of_a_captured_table_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[OpenStores] = []

    @contextmanager
    def counted(consensus: OpenConsensus) -> Iterator[OpenStores]:
        with context.open_stores_of(consensus) as found:
            opened.append(found)
            yield found

    monkeypatch.setattr(why, "open_stores_of", counted)
    turns(monkeypatch, None, AWAY, None, None)
    done = run_tidemill("why orders --watch", cwd=directory)
    assert done.exit_code == 130
    assert done.output.count("no pipeline maintains it") == 3
    assert len(opened) == 1
