"""`tidemill shard`: list, describe and drop shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.base.errors import Invalid, Missing
from tidemill.cli.context import ConfigOption, JsonOption, print_json, stores

if TYPE_CHECKING:
    from tidemill.shards.state import ShardState

app = typer.Typer(help="List, describe and drop shards.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Shard name.")]


@app.command("list")
def list_all(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the shards: readable times, batches, rows and bytes stored."""
    from tidemill.shards.open import read_shards

    with stores(config) as opened:
        found = [_row(state) for state in opened.portal.call(read_shards(opened.consensus))]
    if as_json:
        print_json(found)
        return
    for row in found:
        print(
            f"{row['shard']}  since={row['since']}  upper={row['upper']}  batches={row['batches']}"
            f"  updates={row['updates']:,}  bytes={row['bytes']:,}"
        )


@app.command("describe")
def describe(name: Name, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show one shard: its columns, who holds its history, and what waits for deletion."""
    from tidemill.shards.open import read_shards

    with stores(config) as opened:
        found = [s for s in opened.portal.call(read_shards(opened.consensus)) if s.name == name]
        now_ms = opened.clock.now_ms()
    if not found:
        raise Missing(f"no such shard: shard={name}.", fix="See `tidemill shard list`.")
    state = found[0]
    holds = [
        {"owner": h.reader, "since": h.since, "ends_in_ms": h.expires_ms - now_ms if h.expires_ms else None}
        for h in state.holds
        if h.live(now_ms)
    ]
    row = _row(state) | {
        "columns": {column.name: column.type for column in state.schema.columns},
        "key": list(state.schema.key),
        "holds": holds,
    }
    if as_json:
        print_json(row)
        return
    print(f"{state.name}  id {state.shard_id}")
    print(f"  readable from {state.since} to before {state.upper}" + ("  closed" if state.closed else ""))
    print("  columns " + ", ".join(f"{c.name} {c.type}" for c in state.schema.columns))
    print("  key " + (", ".join(state.schema.key) or "the whole row"))
    print(f"  {row['batches']} batches  {row['updates']:,} updates  {row['bytes']:,} bytes")
    print(f"  waiting for deletion: {row['garbage_bytes']:,} bytes")
    for hold in holds:
        ends = "stays" if hold["ends_in_ms"] is None else f"ends in {hold['ends_in_ms']} ms unless renewed"
        print(f"  held from {hold['since']} by {hold['owner']} ({ends})")


@app.command("drop")
def drop(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a shard. A pipeline that writes it makes it again from its source."""
    from tidemill.keeper.drop import drop_shard, users_of

    with stores(config) as opened:
        users = opened.portal.call(users_of(opened.metastore, name))
        if not yes:
            said = f"It is made again by: {', '.join(users)}." if users else "No pipeline makes it again."
            if as_json or not typer.confirm(f"Delete shard {name} and everything in it? {said}"):
                raise Invalid(f"nothing was deleted: shard={name}.", fix="Say yes, or give --yes.")
        done = opened.portal.call(
            drop_shard(opened.consensus, opened.objects, opened.metastore, opened.clock, opened.rand, name)
        )
    if as_json:
        print_json({"dropped": done.name, "shard_id": done.shard_id, "pipelines": list(done.pipelines)})
        return
    print(f"dropped {done.name}: {done.rows:,} updates, {done.size_bytes:,} bytes, given back within half an hour")
    for pipeline in done.pipelines:
        print(f"  pipeline {pipeline} makes it again from its source")


def _row(state: ShardState) -> dict[str, object]:
    return {
        "shard": state.name,
        "shard_id": state.shard_id,
        "since": state.since,
        "upper": state.upper,
        "batches": len(state.batches),
        "updates": state.rows,
        "bytes": state.size_bytes,
        "garbage_bytes": sum(g.size_bytes for g in state.garbage),
        "closed": state.closed,
    }
