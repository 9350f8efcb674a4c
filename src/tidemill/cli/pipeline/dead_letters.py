"""`tidemill dead-letters`: the dead letters of a pipeline, each with its reason, position and bytes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer

from tidemill.base.errors import MissingError
from tidemill.cli.context import ConfigOption, JsonOption, OpenStores, open_stores, print_json
from tidemill.metastore.catalogue import PipelineRow


def dead_letters(
    pipeline: Annotated[str, typer.Argument(help="Pipeline name. Default: all pipelines.")] = "",
    limit: Annotated[int, typer.Option(help="How many of the newest records to show.", min=1)] = 20,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List dead letters: records and rows that a pipeline could not decode or hold.

    The pipeline skipped them, and continued.
    """
    with open_stores(config) as opened:
        rows = [r for r in opened.portal.call(opened.catalogue.list(PipelineRow)) if pipeline in ("", r.name)]
        if pipeline and not rows:
            raise MissingError(f"no such pipeline: pipeline={pipeline}.", fix="Is its driver running?")
        total, letters = 0, list[dict[str, Any]]()
        for row in rows:
            if row.dead_letters:
                count, newest = _newest_letters(opened, row.dead_letters, limit)
                total, letters = total + count, letters + newest
    letters = sorted(letters, key=_sort_key)[-limit:]
    if as_json:
        print_json({"total": total, "records": letters})
        return
    print(f"{total} dead letters")
    for letter in letters:
        print("  ".join(f"{key}={_format_value(value)}" for key, value in letter.items()))


def _sort_key(letter: dict[str, Any]) -> tuple[Any, ...]:
    return letter["at"], letter["topic"], letter["partition"], letter["offset"]


def _format_value(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else repr(value)


def _newest_letters(opened: OpenStores, name: str, limit: int) -> tuple[int, list[dict[str, Any]]]:
    """Return (total number of dead letters, the newest `limit` of them). Batches are read one at a time, because the
    letters can be large."""
    try:
        shard = opened.shard(name)
        _, upper = opened.portal.call(shard.frontiers())
    except MissingError:
        return 0, []  # the driver has not run yet
    total, kept = 0, list[dict[str, Any]]()
    for batch in opened.portal.call(shard.batches_until(upper - 1)) if upper else ():
        rows = opened.portal.call(shard.read_batch(batch, 0, upper)).select([c.name for c in shard.schema.columns])
        total += rows.num_rows
        rows = rows.sort_by([(name, "ascending") for name in ("at", "topic", "partition", "offset")])
        kept += rows.slice(max(0, rows.num_rows - limit)).to_pylist()
        kept = sorted(kept, key=_sort_key)[-limit:]
    return total, kept
