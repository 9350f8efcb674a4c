"""`tidemill txn`: the transactions of Kafka producers. An open one can be aborted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.context import ConfigOption, DryRunOption, YesOption, confirm, open_consensus_only, preview
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.output.text_table import Column

if TYPE_CHECKING:
    from tidemill.kafka.transactions.state import Transaction

app = typer.Typer(help="List the transactions of Kafka producers, or abort one.", no_args_is_help=True)


@app.command("list")
def list_transactions(
    only_open: Annotated[bool, typer.Option("--open", help="Only transactions that are open or ending.")] = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """List transactional ids: the state of each transaction, how long it is open, and its partitions and groups."""
    from tidemill.kafka.transactions.store import read_all

    with open_consensus_only(config) as opened:
        found = opened.portal.call(read_all(opened.consensus))
        now_ms = opened.clock.now_ms()
    shown = [(each, *found[each][1:]) for each in sorted(found) if found[each][1].started_ms >= 0 or not only_open]
    rows = [_transaction_fields(transactional_id, each, now_ms) for transactional_id, each in shown]
    out.rows(rows, COLUMNS, empty="no transactions")


COLUMNS = (
    Column("transactional id", "transactional_id"),
    Column("state"),
    Column("producer", lambda row: f"{row['producer_id']}/{row['epoch']}"),
    Column("open", lambda row: "" if row["open_ms"] is None else f"{max(0, row['open_ms']) / 1000:.1f} s", right=True),
    Column("timeout", lambda row: f"{row['timeout_ms'] / 1000:.0f} s", right=True),
    Column("partitions", lambda row: sum(map(len, row["partitions"].values()))),
    Column("groups"),
)


def _transaction_fields(transactional_id: str, each: Transaction, now_ms: int) -> dict[str, object]:
    return {
        "transactional_id": transactional_id,
        "state": each.state.kafka_name,
        "producer_id": each.producer_id,
        "epoch": each.epoch,
        "open_ms": now_ms - each.started_ms if each.started_ms >= 0 else None,
        "timeout_ms": each.timeout_ms,
        "partitions": {topic_id: list(partitions) for topic_id, partitions in each.partitions.items()},
        "groups": sorted(each.offsets),
    }


@app.command("abort")
def abort(
    transactional_id: Annotated[str, typer.Argument(help="Transactional id, as shown by `txn list`.")],
    wait_s: Annotated[
        float, typer.Option(help="Wait at most this many seconds until the transaction has ended.", min=0)
    ] = 10.0,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Abort an open transaction and fence its producer. The abort is decided immediately and completed by the running
    nodes."""
    from tidemill.kafka.transactions.store import abort as abort_transaction
    from tidemill.kafka.transactions.store import read_abortable

    with open_consensus_only(config) as opened:
        if dry_run:
            found = opened.portal.call(read_abortable(opened.consensus, opened.clock, transactional_id))
            planned = {"transactional_id": transactional_id, "state": found.state.kafka_name}
            preview(out, planned, f"abort the transaction of {transactional_id}, and fence its producer")
            return
        confirm(f"Abort the transaction of {transactional_id}, and fence its producer?", yes=yes, out=out)
        aborting = abort_transaction(opened.consensus, opened.clock, opened.rand, transactional_id, wait_s=wait_s)
        after = opened.portal.call(aborting)
    ended = not after.state.prepared
    unfinished = f"{transactional_id} is aborted; the nodes that lead its partitions still have to write its markers"
    row = {"transactional_id": transactional_id, "state": after.state.kafka_name, "ended": ended}
    out.one(row, f"aborted {transactional_id}" if ended else unfinished)
