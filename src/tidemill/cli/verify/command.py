"""`tidemill verify [TABLE…]`: compare the source at a commit with the table at the matching time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tidemill.cli.context import ConfigOption, ProgressBars, open_stores
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.output.text_table import Column

if TYPE_CHECKING:
    from tidemill.cli.verify.table import Verified


COLUMNS = (
    Column("table"),
    Column("verdict"),
    Column("rows", lambda row: f"{row['rows']:,}", right=True),
    *(Column(name) for name in ("missing", "extra", "different", "poisoned")),
    Column("at", "time_ms"),
    Column("hash", lambda row: row["shard_hash"][:12]),
)


def verdict_of(verified: Verified) -> str:
    """Return the verdict in one word."""
    if verified.parked:
        return "PARKED"
    if verified.unverified:
        return "UNVERIFIED"
    wrong = verified.missing or verified.extra or verified.different or verified.columns
    return "equal" if verified.clean else "POISONED" if verified.poisoned and not wrong else "DIFFERENT"


def verify(
    tables: Annotated[
        list[str] | None, typer.Argument(help="Table names. Default: every table that a pipeline maintains.")
    ] = None,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Compare tables with their sources: missing, extra and different rows, and a hash. Exit 1 when any differs."""
    from tidemill.cli.verify.tables import Verifier

    with open_stores(config) as opened, ProgressBars(remaining=True) as bars:
        found = opened.portal.call(Verifier(opened, bars.update).tables(tables or ()))
    rows = [msgspec.to_builtins(v) | {"verdict": verdict_of(v)} for v in found]
    out.rows(rows, COLUMNS, value={v.table: msgspec.to_builtins(v) for v in found}, empty="no tables to verify")
    if out.is_text:
        for v in found:
            for said in (v.parked, v.unverified, v.columns, *v.examples):
                if said:
                    print(f"{v.table}: {said}")
    raise SystemExit(0 if all(v.clean for v in found) else 1)
