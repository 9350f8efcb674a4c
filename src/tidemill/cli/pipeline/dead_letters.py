"""`tidemill dead-letters`: the dead letters of a pipeline, each with its reason, position and bytes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer

from tidemill.base.errors import MissingError
from tidemill.cli.context import ConfigOption, JsonOption, OpenStores, open_stores, print_json
from tidemill.console.dead_letter_read import LettersRead, read_letters
from tidemill.console.views.dead_letters import newest_letters
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
        found = [_read_letters(opened, row.dead_letters, limit) for row in rows if row.dead_letters]
    total = sum(each.total for each in found)
    letters = newest_letters((letter for each in found for letter in each.letters), limit)
    if as_json:
        print_json({"total": total, "records": letters})
        return
    print(f"{total} dead letters")
    for letter in letters:
        print("  ".join(f"{key}={_format_value(value)}" for key, value in letter.items()))


def _format_value(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else repr(value)


def _read_letters(opened: OpenStores, name: str, limit: int) -> LettersRead:
    try:
        return opened.portal.call(read_letters(opened.shard(name), limit))
    except MissingError:
        return LettersRead(0, [], 0, [])  # the driver has not run yet
