"""`tidemill shard drop`."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.base.errors import Invalid
from tidemill.cli.context import ConfigOption, JsonOption, print_json, stores
from tidemill.cli.shard.showing import Name


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
