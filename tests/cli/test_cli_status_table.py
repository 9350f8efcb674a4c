"""The table of `tidemill status` prints names and reasons verbatim."""

from __future__ import annotations

import io

from rich.console import Console

from tidemill.base.status.status import StageStatus, derive_status
from tidemill.cli.cluster.status import status_table

NOW_MS = 1_000_000


def test_a_name_or_a_reason_that_looks_like_markup_is_shown_as_it_is() -> None:
    mark = StageStatus("pipeline:a:spark", 0, 1, reason="raised: [/x] [bold]y[/bold] :heart:")
    out = io.StringIO()
    Console(file=out, width=200).print(status_table({mark.name: derive_status(mark, "pipeline:a", NOW_MS, NOW_MS)}))
    shown = out.getvalue()
    assert "pipeline:a:spark" in shown
    assert "raised: [/x] [bold]y[/bold] :heart:" in shown
