"""`tidemill txn`: the transactions of Kafka producers. An open one can be aborted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.context import ConfigOption, JsonOption, YesOption, confirm, open_consensus_only, print_json

if TYPE_CHECKING:
    from tidemill.kafka.transactions.state import Transaction

app = typer.Typer(help="List the transactions of Kafka producers, or abort one.", no_args_is_help=True)


@app.command("list")
def list_transactions(
    only_open: Annotated[bool, typer.Option("--open", help="Only transactions that are open or ending.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List transactional ids: the state of each transaction, how long it is open, and its partitions and groups."""
    from tidemill.kafka.transactions.store import read_all

    with open_consensus_only(config) as opened:
        found = opened.portal.call(read_all(opened.consensus))
        now_ms = opened.clock.now_ms()
    shown = [(each, *found[each][1:]) for each in sorted(found) if found[each][1].started_ms >= 0 or not only_open]
    if as_json:
        print_json([_transaction_fields(transactional_id, each, now_ms) for transactional_id, each in shown])
        return
    for transactional_id, each in shown:
        age_s = f"{max(0, now_ms - each.started_ms) / 1000:.1f}" if each.started_ms >= 0 else "-"
        print(
            f"{transactional_id}  {each.state.kafka_name}  producer={each.producer_id}/{each.epoch}  open_s={age_s}"
            f"  timeout_s={each.timeout_ms / 1000:.0f}  partitions={sum(map(len, each.partitions.values()))}"
            f"  groups={','.join(sorted(each.offsets)) or '-'}"
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
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Abort an open transaction and fence its producer. The abort is decided immediately and completed by the running
    nodes."""
    from tidemill.kafka.transactions.store import abort as abort_transaction

    with open_consensus_only(config) as opened:
        confirm(f"Abort the transaction of {transactional_id}, and fence its producer?", yes=yes, as_json=as_json)
        aborting = abort_transaction(opened.consensus, opened.clock, opened.rand, transactional_id, wait_s=wait_s)
        after = opened.portal.call(aborting)
    ended = not after.state.prepared
    if as_json:
        print_json({"transactional_id": transactional_id, "state": after.state.kafka_name, "ended": ended})
    elif ended:
        print(f"aborted {transactional_id}")
    else:
        print(f"{transactional_id} is aborted; the nodes that lead its partitions still have to write its markers")
