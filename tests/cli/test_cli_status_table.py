"""The table of `tidemill status` prints names and reasons verbatim."""

from __future__ import annotations

from tidemill.base.status.status import StageStatus, derive_status
from tidemill.cli.cluster.status import STAGE_COLUMNS, status_lines
from tidemill.cli.output.text_table import format_table

NOW_MS = 1_000_000


def test_a_name_or_a_reason_that_looks_like_markup_is_shown_as_it_is() -> None:
    mark = StageStatus("pipeline:a:spark", 0, 1, reason="raised: [/x] [bold]y[/bold] :heart:")
    rows = status_lines({mark.name: derive_status(mark, "pipeline:a", NOW_MS, NOW_MS)})
    *_, shown = format_table(STAGE_COLUMNS, rows)
    assert shown.startswith("pipeline:a:spark") and shown.endswith("raised: [/x] [bold]y[/bold] :heart:")
