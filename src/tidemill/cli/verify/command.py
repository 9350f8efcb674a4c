"""`tidemill verify [TABLE…]`: compare the source at a commit with the table at the matching time."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tidemill.cli.context import ConfigOption, JsonOption, ProgressBars, open_stores, print_json


def verify(
    tables: Annotated[
        list[str] | None, typer.Argument(help="Table names. Default: every table that a pipeline maintains.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare tables with their sources: missing, extra and different rows, and a hash. Exit 1 when any differs."""
    from tidemill.cli.verify.tables import Verifier

    with open_stores(config) as opened, ProgressBars(remaining=True) as bars:
        found = opened.portal.call(Verifier(opened, bars.update).tables(tables or ()))
    if as_json:
        print_json({v.table: msgspec.to_builtins(v) for v in found})
    else:
        for v in found:
            if v.parked:
                print(f"{v.table:24} PARKED  {v.parked}")
                continue
            wrong = v.missing or v.extra or v.different or v.columns
            verdict = "equal" if v.clean else "POISONED" if v.poisoned and not wrong else "DIFFERENT"
            print(
                f"{v.table:24} {v.rows:>10,} rows  missing {v.missing}  extra {v.extra}  different {v.different}"
                f"  poisoned {v.poisoned}"
                f"  {v.shard_hash[:12]}  at {v.time_ms}  {verdict}"
            )
            if v.columns:
                print(f"    {v.columns}")
            for example in v.examples:
                print(f"    {example}")
    raise SystemExit(0 if all(v.clean for v in found) else 1)
