"""`tidemill txn` on a cluster with nothing running."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cli.cluster import Cluster
from tidemill.base.errors import ConflictError, MissingError
from tidemill.cli.context import open_consensus_only
from tidemill.kafka.transactions.state import GroupOffset, State, Transaction
from tidemill.kafka.transactions.store import change, read
from tidemill.kafka.transactions.transitions import Decision


class TransactionCluster(Cluster):
    group = "txn"

    def store(self, transactional_id: str, state: Transaction) -> None:
        with open_consensus_only(self.config, create=True) as opened:
            changing = change(opened.consensus, opened.rand, transactional_id, lambda _: Decision(0, state))
            opened.portal.call(changing)

    def stored(self, transactional_id: str) -> Transaction | None:
        with open_consensus_only(self.config, create=True) as opened:
            return opened.portal.call(read(opened.consensus, transactional_id))


def test_transactions_are_listed_and_an_open_one_is_aborted_once(tmp_path: Path) -> None:
    cluster = TransactionCluster(tmp_path)
    assert (cluster.command("list"), cluster.json("list")) == ("no transactions\n", [])
    offsets = {"g": {"t": {0: GroupOffset(5)}}}
    cluster.store("odd id/ü", Transaction(7, 3, State.ONGOING, 60_000, {"t": (0, 2)}, offsets, started_ms=1))
    cluster.store("idle", Transaction(8, 0, State.COMPLETE_COMMIT, 60_000))
    (row,) = cluster.json("list", "--open")
    assert (row["transactional_id"], row["state"], row["epoch"]) == ("odd id/ü", "Ongoing", 3)
    assert (row["partitions"], row["groups"]) == ({"t": [0, 2]}, ["g"])
    assert [each["transactional_id"] for each in cluster.json("list")] == ["idle", "odd id/ü"]
    shown = cluster.command("list").splitlines()[-1]
    assert shown.startswith("odd id/ü") and shown.split()[-2:] == ["2", "g"]

    before = cluster.stored("odd id/ü")
    assert cluster.command("abort", "--dry-run", "odd id/ü").startswith("dry run: abort the transaction of odd id/ü")
    assert cluster.json("abort", "--dry-run", "odd id/ü") == {
        "dry_run": True, "transactional_id": "odd id/ü", "state": "Ongoing"
    }  # fmt: skip
    assert cluster.stored("odd id/ü") == before

    reported = cluster.json("abort", "--yes", "odd id/ü", "--wait-s", "0")
    assert reported == {"transactional_id": "odd id/ü", "state": "PrepareAbort", "ended": False}
    after = cluster.stored("odd id/ü")
    assert after is not None and (after.state, after.epoch, after.offsets) == (State.PREPARE_ABORT, 4, {})
    assert "still have to write its markers" in cluster.command(
        "abort", "--yes", "odd id/ü", "--wait-s", "0"
    )  # the same again
    assert cluster.stored("odd id/ü") == after


def test_what_is_not_open_is_not_aborted(tmp_path: Path) -> None:
    cluster = TransactionCluster(tmp_path)
    for option in ("--yes", "--dry-run"):
        with pytest.raises(MissingError):
            cluster.command("abort", option, "nobody")
    for state in (State.EMPTY, State.PREPARE_COMMIT, State.COMPLETE_COMMIT, State.COMPLETE_ABORT):
        cluster.store("id", Transaction(7, 3, state, 60_000))
        for option in ("--yes", "--dry-run"):
            with pytest.raises(ConflictError):
                cluster.command("abort", option, "id")
