"""`tidemill shard`: what is stored of a table, and what may be done with it. One file a purpose."""

from __future__ import annotations

import typer

from tidemill.cli.shard import changing, dropping, exporting, showing

app = typer.Typer(help="List, describe, compact, evolve, export and drop shards.", no_args_is_help=True)
app.command("list")(showing.list_all)
app.command("describe")(showing.describe)
app.command("history")(showing.history)
app.command("compact")(changing.compact)
app.command("evolve")(changing.evolve)
app.command("export")(exporting.export)
app.command("drop")(dropping.drop)

__all__ = ["app"]
