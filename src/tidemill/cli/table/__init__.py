"""`tidemill table`: inspect and maintain the stored tables. One file per purpose."""

from __future__ import annotations

import typer

from tidemill.cli.table import drop, export, maintain, show

app = typer.Typer(help="List, describe, compact, evolve, export and drop tables.", no_args_is_help=True)
app.command("list")(show.list_all)
app.command("describe")(show.describe)
app.command("history")(show.history)
app.command("compact")(maintain.compact)
app.command("evolve")(maintain.evolve)
app.command("export")(export.export)
app.command("drop")(drop.drop)

__all__ = ["app"]
