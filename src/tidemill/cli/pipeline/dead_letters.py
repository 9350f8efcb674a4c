"""`tidemill dead-letters`: the dead letters of a pipeline, each with its reason, position and bytes."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.base.errors import MissingError
from tidemill.cli.context import ConfigOption, OpenStores, open_stores
from tidemill.cli.output.output import TABLE, Output
from tidemill.console.dead_letter_read import LettersRead, read_letters
from tidemill.console.views.dead_letters import newest_letters
from tidemill.metastore.catalogue import PipelineRow


def dead_letters(
    pipeline: Annotated[str, typer.Argument(help="Pipeline name. Default: all pipelines.")] = "",
    limit: Annotated[int, typer.Option(help="How many of the newest records to show.", min=1)] = 20,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """List dead letters: records and rows that a pipeline could not decode or hold.

    The pipeline skipped them, and continued.
    """
    with open_stores(config) as opened:
        rows = [r for r in opened.portal.call(opened.catalogue.list(PipelineRow)) if pipeline in ("", r.name)]
        if pipeline and not rows:
            if pipeline in opened.config.pipeline:
                raise MissingError(f"the pipeline has not run yet: pipeline={pipeline}.", fix="Start it: tidemill up.")
            raise MissingError(f"no such pipeline: pipeline={pipeline}.", fix="See `tidemill pipeline list`.")
        found = [_read_letters(opened, row.dead_letters, limit) for row in rows if row.dead_letters]
    total = sum(each.total for each in found)
    letters = newest_letters((letter for each in found for letter in each.letters), limit)
    if out.is_text:
        print(f"{total} dead letter{'' if total == 1 else 's'}")
    if letters or not out.is_text:
        out.rows(letters, value={"total": total, "records": letters})


def _read_letters(opened: OpenStores, name: str, limit: int) -> LettersRead:
    try:
        return opened.portal.call(read_letters(opened.shard(name), limit))
    except MissingError:
        return LettersRead(0, [], 0, [])  # the driver has not run yet
