"""What an operator may ask of a captured table, written into its row; the capture's process does it within seconds.

recopy    the table is copied again; its shards take that over where they lose nothing by it
accept    they take it over though they do: what that means for each of them is shown first, and accepted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, MissingError
from tidemill.metastore.catalogue import Accepted, CaptureTableRow, Catalogue
from tidemill.shards.api import ShardSchema
from tidemill.shards.parts.pg_columns import as_held
from tidemill.shards.parts.schema import difference
from tidemill.shards.parts.schema_evolution import changes_to
from tidemill.shards.state.state import ShardState


class Becoming(msgspec.Struct, frozen=True):
    """What becomes of one shard: `kept` as it is, `grown` or `anew` with what it was made of gone, by `changes`."""

    shard: str
    how: str
    changes: str = ""
    accepted: Accepted | None = None
    """What has to be for that; None = nothing"""
    instants: tuple[str, ...] = ()
    """Columns that the table has as clocks (timestamp without a zone), and the shard goes on holding as instants"""


def becoming(state: ShardState, wanted: ShardSchema) -> Becoming:
    """What a shard would be once it is fed by a table of `wanted`. Pure. A column keeps the type of timestamp that the
    shard has (RFC 0007)."""
    held = as_held(wanted.columns, state.schema)
    instants = tuple(c.name for c, other in zip(held, wanted.columns, strict=True) if c.type != other.type)
    wanted = replace(wanted, columns=held)
    names = tuple(column.name for column in state.schema.columns)
    try:
        changes = changes_to(state.schema, wanted, names)
    except InvalidError:
        said = difference(state.schema, wanted)
        return Becoming(state.name, "anew", said, Accepted(state.shard_id, anew=True))
    accepted = Accepted(state.shard_id, changes.retire) if changes.retire else None
    return Becoming(state.name, "grown" if changes else "kept", str(changes), accepted, instants)


async def ask(catalogue: Catalogue, capture: str, table: str) -> CaptureTableRow:
    """Have a table copied again, into a new generation of its topic. Raises MissingError, InvalidError for one that
    never was."""

    def asked(found: CaptureTableRow) -> CaptureTableRow:
        return replace(found, recopy=True, accepted=())

    return await _change(catalogue, capture, table, asked)


async def accept(
    catalogue: Catalogue, capture: str, table: str, shards: Sequence[Accepted], *, copied: bool
) -> CaptureTableRow:
    """Let these shards become what the table is; `copied`: it is copied again for that. Raises as `ask`."""

    def asked(found: CaptureTableRow) -> CaptureTableRow:
        return replace(found, recopy=copied or found.recopy, accepted=tuple(shards))

    return await _change(catalogue, capture, table, asked)


async def _change(
    catalogue: Catalogue, capture: str, table: str, change: Callable[[CaptureTableRow], CaptureTableRow]
) -> CaptureTableRow:
    def changed(found: CaptureTableRow | None) -> CaptureTableRow:
        if found is None:
            raise MissingError(
                f"no such captured table: capture={capture} table={table}.", fix="See tidemill capture list."
            )
        if found.state in ("refused", "left", "dropped"):
            raise InvalidError(f"the table is not captured: {found.reason}", fix=found.fix)
        return change(found)

    row = await catalogue.change_table(capture, table, changed)
    assert row is not None
    return row
