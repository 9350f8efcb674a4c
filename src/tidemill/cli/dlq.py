"""`tidemill dlq`: the dead letters of a pipeline, each with reason, position and bytes."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.base.errors import Missing
from tidemill.cli.context import ConfigOption, JsonOption, print_json, stores
from tidemill.metastore.catalogue import PipelineRow


def dlq(
    pipeline: Annotated[str, typer.Argument(help="Pipeline name; empty = all.")] = "",
    limit: Annotated[int, typer.Option(help="Newest records to show.", min=1)] = 20,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List records that a pipeline could not read; it went on without them."""
    with stores(config) as opened:
        rows = [r for r in opened.portal.call(opened.catalogue.list(PipelineRow)) if pipeline in ("", r.name)]
        if pipeline and not rows:
            raise Missing(f"no such pipeline: pipeline={pipeline}.", fix="Is its driver running?")
        letters = []
        for row in rows:
            if not row.dead_letters:
                continue
            shard = opened.shard(row.dead_letters)
            _, upper = opened.portal.call(shard.frontiers())
            if upper > 0:
                letters += opened.portal.call(shard.snapshot(upper - 1)).to_pylist()
    total = len(letters)
    letters = letters[-limit:]
    if as_json:
        print_json({"total": total, "records": letters})
        return
    print(f"{total} dead letters")
    for letter in letters:
        print("  ".join(f"{key}={value!r}" for key, value in letter.items()))
