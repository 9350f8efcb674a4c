"""Match of a DataFrame's columns to a shard: accept them unchanged, evolve the schema, or reject. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, MissingError
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.schema import check_schema, describe_difference
from tidemill.shards.parts.schema_evolution import is_widening


class WriteFrame(msgspec.Struct, frozen=True):
    """Description of a write.

    `key`: the shard's key columns in order. `delete`: a bool column that is not stored; a row where it is true deletes
    its key. `overwrite`: the rows replace the contents. `grows`: the shard's schema may evolve (mergeSchema). `beside`:
    the pipeline that maintains the shard, if the user named it. `keys_only`: the DataFrame has only the key columns of
    the shard, so every row must be a deletion.
    """

    shard: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    delete: str = ""
    overwrite: bool = False
    grows: bool = False
    keys_only: bool = False
    beside: str = ""
    there: bool = False
    """True if the key was taken from a shard that existed when this was planned; if that is gone, no shard is
    created."""

    @property
    def stored(self) -> ShardSchema:
        """Columns that are stored, as the DataFrame has them."""
        return ShardSchema(tuple(c for c in self.columns if not self.delete or c.name != self.delete), self.key)


def plan_frame(frame: WriteFrame, have: ShardSchema | None) -> WriteFrame:
    """Return the frame with the key that it is written by. Raises InvalidError, MissingError if it cannot be
    written."""
    if frame.delete:
        kind = {c.name: c.type for c in frame.columns}.get(frame.delete, "no such column")
        if kind != "bool":
            raise InvalidError(
                f"the delete column is not boolean: delete={frame.delete} type={kind}.",
                fix="Name a boolean column of the DataFrame.",
            )
        if frame.overwrite:
            raise InvalidError(
                "an overwrite has nothing to delete: the given rows become the contents.", fix="Remove option delete."
            )
    if have is None and not frame.key:
        raise MissingError(
            f"no such table: table={frame.shard}.", fix="Set option key=COLUMN,… to create it, or correct the name."
        )
    key = frame.key or (have.key if have is not None else ())
    given = {c.name for c in frame.stored.columns}
    lacking = have is not None and not {c.name for c in have.columns} <= given
    found = replace(frame, key=key, there=not frame.key, keys_only=bool(frame.delete) and lacking and given == set(key))
    required_schema(found, have)
    return found


def required_schema(frame: WriteFrame, have: ShardSchema | None) -> ShardSchema:
    """Return the schema that the shard needs for these rows, `have` itself if it suffices. Raises InvalidError."""
    stored = frame.stored
    if have is None:
        return check_schema(stored)
    if not have.key:
        raise InvalidError(
            f"the table has no key, so nothing can be written by key: table={frame.shard}.", fix="Use another table."
        )
    check_schema(stored)
    if stored.key != have.key:
        said = f"table={frame.shard} key={','.join(have.key)} wanted={','.join(stored.key)}"
        raise InvalidError(f"the table has another key: {said}.", fix="Remove option key: the table's key is used.")
    given = {c.name: c.type for c in stored.columns}
    lacking = [c.name for c in have.columns if c.name not in given]
    wanted = [replace(c, type=_common_type(c.type, given.get(c.name, c.type))) for c in have.columns]
    added = [c for c in stored.columns if c.name not in {c.name for c in have.columns}]
    if any(not c.type for c in wanted) or (lacking and not frame.keys_only):
        raise _schema_mismatch_error(frame, have, stored, "Rename, cast or add columns to match those of the table.")
    want = replace(have, columns=(*wanted, *added))
    if want.columns != have.columns and not frame.grows:
        raise _schema_mismatch_error(frame, have, stored, "Set option mergeSchema=true to evolve the table's schema.")
    return want


def _common_type(have: str, given: str) -> str:
    """Return the type that represents every value of both exactly, or ""."""
    if have == given or is_widening(given, have):
        return have
    return given if is_widening(have, given) else ""


def _schema_mismatch_error(frame: WriteFrame, have: ShardSchema, stored: ShardSchema, fix: str) -> InvalidError:
    ordered = _in_order_of(have, stored.columns)
    shown = describe_difference(have, replace(have, columns=ordered)) or "none"
    return InvalidError(
        f"the DataFrame's columns differ from the table's: table={frame.shard} difference=[{shown}].", fix=fix
    )


def _in_order_of(have: ShardSchema, columns: Sequence[Column]) -> tuple[Column, ...]:
    places = {c.name: at for at, c in enumerate(have.columns)}
    return tuple(sorted(columns, key=lambda c: places.get(c.name, len(places))))
