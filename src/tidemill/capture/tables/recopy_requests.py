"""Requests of an operator for a captured table, written into its row. The capture's process executes them within
seconds.

recopy    the table is re-snapshotted; its shards take the copy over if they lose nothing by it
accept    shards take the copy over even if they lose data: the effect on each of them is shown first, and accepted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, MissingError
from tidemill.metastore.catalogue import AcceptedSchemaChange, CaptureTableRow, Catalogue
from tidemill.shards.api import ShardSchema
from tidemill.shards.parts.pg_columns import with_existing_types
from tidemill.shards.parts.schema import describe_difference
from tidemill.shards.parts.schema_evolution import schema_changes
from tidemill.shards.state.state import ShardState


class ShardEffect(msgspec.Struct, frozen=True):
    """Effect on one shard: `kept` unchanged, `grown` by `changes`, or re-created without its former
    content, because of `changes`.
    """

    shard: str
    how: str
    changes: str = ""
    accepted: AcceptedSchemaChange | None = None
    """The acceptance that is required for this; None = none"""
    instants: tuple[str, ...] = ()
    """Columns that are clock times in the table (timestamp without a zone) and remain instants in the shard"""
    texts: tuple[str, ...] = ()
    """Columns that are arrays in the table and remain text in the shard"""


def predict_shard_effect(state: ShardState, wanted: ShardSchema) -> ShardEffect:
    """Return the effect on a shard if a table with the schema `wanted` feeds it. Pure. A column keeps the type that the
    shard has as `with_existing_types` describes.
    """
    held = with_existing_types(wanted.columns, state.schema)
    kept = [c for c, other in zip(held, wanted.columns, strict=True) if c.type != other.type]
    instants = tuple(c.name for c in kept if c.type == "timestamp")
    texts = tuple(c.name for c in kept if c.type == "string")
    wanted = replace(wanted, columns=held)
    names = tuple(column.name for column in state.schema.columns)
    try:
        changes = schema_changes(state.schema, wanted, names)
    except InvalidError:
        said = describe_difference(state.schema, wanted)
        return ShardEffect(state.name, "anew", said, AcceptedSchemaChange(state.shard_id, anew=True))
    accepted = AcceptedSchemaChange(state.shard_id, changes.retire) if changes.retire else None
    return ShardEffect(state.name, "grown" if changes else "kept", str(changes), accepted, instants, texts)


def check_captured(row: CaptureTableRow) -> None:
    """Raise InvalidError for a table that is not captured: a request for it would be refused. Pure."""
    if row.state in ("refused", "left", "dropped"):
        raise InvalidError(f"the table is not captured: {row.reason}", fix=row.fix)


async def request_recopy(catalogue: Catalogue, capture: str, table: str) -> CaptureTableRow:
    """Request another copy of a table, into a new generation of its topic. Raises MissingError for an unknown table,
    InvalidError for a table that is not captured.
    """

    def with_request(found: CaptureTableRow) -> CaptureTableRow:
        return replace(found, recopy=True, accepted=())

    return await _change_captured_table(catalogue, capture, table, with_request)


async def accept_effects(
    catalogue: Catalogue, capture: str, table: str, shards: Sequence[AcceptedSchemaChange], *, copied: bool
) -> CaptureTableRow:
    """Accept that these shards change as the table did. `copied`: the table is re-snapshotted for that. Raises the
    errors of `request_recopy`.
    """

    def with_acceptance(found: CaptureTableRow) -> CaptureTableRow:
        return replace(found, recopy=copied or found.recopy, accepted=tuple(shards))

    return await _change_captured_table(catalogue, capture, table, with_acceptance)


async def _change_captured_table(
    catalogue: Catalogue, capture: str, table: str, change: Callable[[CaptureTableRow], CaptureTableRow]
) -> CaptureTableRow:
    def changed(found: CaptureTableRow | None) -> CaptureTableRow:
        if found is None:
            raise MissingError(
                f"no such captured table: capture={capture} table={table}.", fix="See tidemill capture list."
            )
        check_captured(found)
        return change(found)

    row = await catalogue.change_table(capture, table, changed)
    assert row is not None
    return row
