"""`tidemill capture accept TABLE`: capture a table with changed columns or key, and carry its pipeline tables over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.base.errors import InvalidError, MissingError, drop_table_command
from tidemill.cli.context import DRY_RUN, OpenStores, confirm
from tidemill.cli.output.output import Output
from tidemill.metastore.catalogue import CaptureTableRow, PipelineRow

if TYPE_CHECKING:
    from tidemill.capture.changes import Relation
    from tidemill.capture.tables.recopy_requests import ShardEffect
    from tidemill.shards.api import ShardSchema


def accept_table(opened: OpenStores, row: CaptureTableRow, *, yes: bool, dry_run: bool, out: Output) -> None:
    """Show the difference and the effect on each shard, ask for confirmation, and record what was agreed to. With
    `dry_run` only show them.

    Raises InvalidError if the user declines or the table is not or cannot be captured, MissingError if it is gone.
    """
    from tidemill.capture.tables import recopy_requests

    now = _describe_source_table(opened, row)
    recopy_requests.check_captured(row)
    difference = _column_difference(row, now)
    copied = bool(difference or row.paused_lsn)
    shards = _affected_shards(opened, row, _wanted_schema(row, now))
    needed = [found.accepted for found in shards if found.accepted is not None]
    done = bool(copied or needed)
    if out.is_text:
        _print_changes(row, difference, shards, copied)
    if done and not dry_run:
        confirm(f"Capture {row.table} with these changes?", yes=yes, out=out)
        opened.portal.call(
            recopy_requests.accept_effects(opened.catalogue, row.capture, row.table, needed, copied=copied)
        )
    effects = [
        {"shard": s.shard, "becomes": s.how, "changes": s.changes}
        | ({"instants": list(s.instants)} if s.instants else {})
        | ({"texts": list(s.texts)} if s.texts else {})
        for s in shards
    ]
    answer = {
        "capture": row.capture, "table": row.table, "difference": difference, "copied_again": copied, "shards": effects
    }  # fmt: skip
    if not out.is_text:
        mark = DRY_RUN if dry_run else {}
        out.rows([{**mark, **effect} for effect in effects], value=answer | mark)
    elif done and dry_run:
        print("dry run: nothing was accepted")
    elif done:
        print("Accepted. The change takes effect within seconds. See: tidemill capture list, tidemill why")
    else:
        print("Nothing to accept: the table is being captured and the pipelines' tables match it.")


def _describe_source_table(opened: OpenStores, row: CaptureTableRow) -> Relation:
    """Return the table as its database describes it now. Raises MissingError if it is gone, InvalidError if it cannot
    be captured under that name or has no primary key."""
    from tidemill.capture.catalog.relations import describe_tables
    from tidemill.capture.postgres.connection import PgConnection

    section = opened.config.capture.get(row.capture)
    if section is None:
        raise InvalidError(
            f"no database is configured for this capture: capture={row.capture}.", fix="Add it to tidemill.toml again."
        )

    async def fetch_relation() -> Relation | None:
        wire = await PgConnection.connect(section.dsn, purpose="accept", capture=row.capture)
        try:
            return (await describe_tables(wire, [row.oid])).get(row.oid)
        finally:
            await wire.aclose()

    now = opened.portal.call(fetch_relation())
    if now is None:
        raise MissingError(
            f"the table is gone from the source: table={row.table}.", fix="Re-create it, or drop the pipeline's table."
        )
    if now.name != row.table:
        raise InvalidError(
            f"the table is now named {now.name}: table={row.table}.",
            fix="It is captured under its new name if `tables` includes that name. The pipeline's table of the old name"
            " gets no more updates.",
        )
    if not now.key_columns:
        raise InvalidError(
            f"a captured table needs a primary key: table={row.table}.", fix="Add one, then accept the table."
        )
    return now


def _column_difference(row: CaptureTableRow, now: Relation) -> str:
    from tidemill.capture.catalog.schema_diff import diff_against_catalogue

    return diff_against_catalogue(row.columns, now)


def _wanted_schema(row: CaptureTableRow, now: Relation) -> ShardSchema:
    """Return the schema that a shard created now would have. Raises InvalidError for a column type that no shard can
    store."""
    from tidemill.capture.catalog.schema_versions import shard_schema_of
    from tidemill.capture.tables.table_setup import captured_columns_of

    try:
        return shard_schema_of(captured_columns_of(now))
    except InvalidError as error:
        raise InvalidError(
            f"no pipeline can store this table: table={row.table} {error.message}", fix=error.fix
        ) from error


def _affected_shards(opened: OpenStores, row: CaptureTableRow, wanted: ShardSchema) -> list[ShardEffect]:
    """Return the effect on every existing shard that a pipeline maintains from the table."""
    from tidemill.capture.tables.recopy_requests import predict_shard_effect
    from tidemill.shards.registry import read_shard

    source = f"capture:{row.capture}:{row.table}"
    pipelines = opened.portal.call(opened.catalogue.list(PipelineRow))
    names = sorted({name for found in pipelines for name, fed_by in found.tables.items() if fed_by == source})
    states = [opened.portal.call(read_shard(opened.consensus, name)) for name in names]
    return [predict_shard_effect(state, wanted) for state in states if state is not None]


def _print_changes(row: CaptureTableRow, difference: str, shards: list[ShardEffect], copied: bool) -> None:
    print(f"{row.table} of capture {row.capture}: {difference or 'its columns are unchanged'}")
    if copied:
        rows = row.snapshot.rows if row.snapshot is not None else 0
        print(f"  it is copied again ({rows:,} rows last time) into re-created topic {row.topic}; its shapes restart")
    for found in shards:
        print(f"  table {found.shard}: {_format_effect(found)}")
    if not shards:
        print("  no pipeline maintains a table of it")


def _format_effect(found: ShardEffect) -> str:
    if found.how == "kept":
        return "is kept unchanged and continues with the new copy" + _kept_types_note(found)
    if found.how == "grown":
        return found.changes + _kept_types_note(found)
    return f"is dropped and re-created, and its history ends: {found.changes}"


def _kept_types_note(found: ShardEffect) -> str:
    """Describe the columns that stay instants (RFC 0007) or text: a shard retains the type that it has."""
    said = ""
    if found.instants:
        said += (
            f"; {', '.join(found.instants)}: a timestamp without time zone in the source, an instant in the table as"
            f" before, its value read as UTC ({drop_table_command(found.shard)} re-creates it without time zones)"
        )
    if found.texts:
        said += f"; {', '.join(found.texts)}: an array in the source, its text in the table as before"
    return said
