"""`tidemill pipeline`: give up a pipeline that was stopped for good."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.base.errors import Invalid
from tidemill.base.limits import MARK_BLIND_AFTER_MS
from tidemill.cli.context import ConfigOption, JsonOption, print_json, stores
from tidemill.consensus.board import Board
from tidemill.metastore.catalogue import PipelineRow

app = typer.Typer(help="Give up a pipeline that was stopped for good.", no_args_is_help=True)


@app.callback()
def pipeline() -> None:
    """Give up a pipeline that was stopped for good."""


@app.command("delete")
def delete(
    name: Annotated[str, typer.Argument(help="Name of the pipeline.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget a pipeline that does not run: no bindings and records are kept for it any more; its tables stay as they
    are, until `shard drop`. One that runs is refused. Started later, it may find that what it had not read is gone."""
    with stores(config) as opened:
        board = Board(opened.consensus, opened.rand)
        for report in opened.portal.call(board.reports()):
            of_it = report.process == f"pipeline:{name}" or report.process.startswith(f"pipeline:{name}:")
            if of_it and opened.clock.now_ms() - report.at_ms <= MARK_BLIND_AFTER_MS:
                raise Invalid(
                    f"the pipeline runs: pipeline={name} process={report.process} pid={report.pid} host={report.host}.",
                    fix="Stop it, and take it out of the configuration.",
                )
        opened.portal.call(opened.catalogue.delete(PipelineRow, name))
    if as_json:
        print_json({"deleted": name})
    else:
        print(f"deleted {name}; its tables stay")
