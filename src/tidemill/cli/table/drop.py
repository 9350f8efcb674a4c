"""`tidemill table drop`: delete a table that is not in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.cli.context import (
    ConfigOption,
    DryRunOption,
    OldForce,
    OpenStores,
    YesOption,
    confirm,
    either_name,
    open_stores,
    preview,
)
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.table.show import Name, read_shard_state

if TYPE_CHECKING:
    from tidemill.shards.state.state import ShardState


def drop(
    name: Name,
    yes: YesOption = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Delete a table that is in use. Asks only for a history, or if its topics lack records.",
        ),
    ] = False,
    yes_really: OldForce = False,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Delete a table. A table that is written or read is refused.

    A pipeline that writes the table creates it again from its source, and derived tables that read it wait until then.
    Rows whose records the topic no longer has are lost for good: that is asked, unless --yes is given.
    """
    from tidemill.maintenance.shards.drop import drop_shard, expired_records
    from tidemill.shards.registry import read_shard
    from tidemill.shards.state.state import input_of_token
    from tidemill.topics.partition_reader import LogPartitionReader

    force = either_name(force, yes_really, "--force", "--yes-really")
    with open_stores(config) as opened:
        found = opened.portal.call(read_shard(opened.consensus, name))
        users = [] if force else _shard_users(opened, name, found)
        if users:
            raise InvalidError(
                f"the table is in use: table={name} by={', '.join(users)}.",
                fix="Its readers fail without it, and a pipeline re-creates it from its source. To delete it anyway:"
                " --force",
            )
        expired: dict[str, int | None] = {}
        if dry_run or not yes:
            reader = LogPartitionReader(opened.consensus, opened.objects)
            expired = opened.portal.call(expired_records(opened.catalogue, reader, name))
        loss = "".join(_loss_sentence(topic, count) for topic, count in expired.items())
        if found is not None and any(input_of_token(writer.token) for writer in found.writers):
            loss += " Its earlier versions are in no other table: they are lost for good."
        if dry_run:
            state = read_shard_state(opened, name)
            row = {"dropped": name, "shard_id": state.shard_id, "updates": state.rows, "bytes": state.size_bytes}
            row |= {"expired_records": expired}
            preview(out, row, f"drop {name}: {state.rows:,} updates, {state.size_bytes:,} bytes{loss}")
            return
        agreed = yes or (force and not loss)
        confirm(f"Delete table {name} and everything in it?{loss}", yes=agreed, out=out)
        done = opened.portal.call(
            drop_shard(
                opened.consensus, opened.objects, opened.metastore, opened.clock, opened.rand, name,
                shard_id=found.shard_id if found is not None else "",  # never a table that was created later
            )
        )  # fmt: skip
    lines = [f"dropped {done.name}: {done.rows:,} updates, {done.size_bytes:,} bytes, freed within half an hour"]
    for pipeline in done.pipelines:
        lines.append(f"  pipeline {pipeline} re-creates it from its source. If it was stopped for good, delete it too:")
        lines.append(f"  tidemill pipeline delete {pipeline}")
    row = {"dropped": done.name, "shard_id": done.shard_id, "pipelines": list(done.pipelines)}
    out.one(row, "\n".join(lines))


def _loss_sentence(topic: str, expired: int | None) -> str:
    """Return what the table cannot be created again from."""
    if expired is None:
        return f" Topic {topic} no longer exists or cannot be read: all rows from it are lost for good."
    return (
        f" Topic {topic} no longer has its {expired:,} oldest records: rows that only they contain are lost for good."
    )


def _shard_users(opened: OpenStores, name: str, state: ShardState | None) -> list[str]:
    """Return the pipelines that write the table, the derived tables that read it, the blockers of its history, and the
    shapes that this configuration's node has of it. Raises InvalidError or UnavailableError if that node runs and does
    not list its shapes.

    An interrupted drop left a state that no process holds: `drop_shard` continues with it, or raises MissingError.
    """
    from tidemill.cli.shape import live_shapes
    from tidemill.maintenance.shards.drop import reading_derived_tables, writing_pipelines
    from tidemill.shards.read.holds import OBJECTS_ONLY

    now_ms = opened.clock.now_ms()
    holds = state.holds if state is not None else ()
    found = [f"pipeline:{user}" for user in opened.portal.call(writing_pipelines(opened.metastore, name))]
    found += [f"shard:{table}" for table in opened.portal.call(reading_derived_tables(opened.metastore, name))]
    live = [hold for hold in holds if hold.expires_ms and hold.is_live(now_ms)]
    found += [f"hold:{hold.reader}" for hold in live if hold.since != OBJECTS_ONLY]  # publications end with the table
    try:
        shapes = live_shapes(opened.config)
    except (InvalidError, UnavailableError) as error:
        raise type(error)(
            f"it is unknown whether the node has shapes of the table: {error.message}",
            fix=f"{error.fix} To delete it anyway: --force".strip(),
        ) from error
    return found + [f"shape:{shape['handle']}" for shape in shapes if shape["source"] == f"shard:{name}"]
