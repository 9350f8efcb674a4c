"""Open shards by name. The register `shard/<name>` decides a shard's id and first schema, once; its log has the rest.

register shard/<name>     the encoded Create command (codec): the first writer wins. Drop after it frees the name
log      shard/<shard id> commands; the first is the same Create, written by the first process that opens the shard
"""

from __future__ import annotations

import asyncio
import contextlib

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import (
    AS_RETAINED,
    ConflictError,
    CorruptError,
    InvalidError,
    MissingError,
    UnknownOutcomeError,
    drop_table_command,
)
from tidemill.consensus.api import Consensus, Versioned
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import RunCpuWork, ShardSchema, run_inline
from tidemill.shards.bindings.remap import LogRemap
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.schema import check_schema, describe_difference
from tidemill.shards.parts.schema_evolution import schema_changes
from tidemill.shards.state.apply import RejectedCommand, RejectionReason
from tidemill.shards.state.codec import decode_command, encode_command
from tidemill.shards.state.commands import REGISTER_PREFIX, Create, Drop, Evolve
from tidemill.shards.state.state import ShardState
from tidemill.shards.state.state_machine import ShardMachine, open_machine, rejection_error, shard_replica

NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
NAME_LENGTH = 200
_TOMBSTONES = ".tombstones."
_ID_LENGTH = 36


async def open_shard(
    consensus: Consensus,
    objects: ObjectStore,
    clock: Clock,
    rand: Rand,
    name: str,
    schema: ShardSchema | None = None,
    *,
    cpu: RunCpuWork = run_inline,
) -> LogShard:
    """Open a shard. With `schema`, create it if absent, and add the columns, with their defaults, and the wider types
    that it lacks.

    Raises MissingError (absent and no schema given), InvalidError (bad name or schema, or it exists with one that
    cannot become this one: the message has the difference), ClosedError, UnavailableError, UnknownOutcomeError.
    """
    check_shard_name(name)
    machine = await _open_or_create(consensus, rand, name, None if schema is None else check_schema(schema))
    if schema is not None:
        try:
            await _evolve(machine, check_schema(schema, defaults=True), clock)
        except BaseException:
            await machine.aclose()
            raise
    return LogShard(machine, objects, clock, rand, cpu=cpu)


async def _open_or_create(consensus: Consensus, rand: Rand, name: str, wanted: ShardSchema | None) -> ShardMachine:
    """Return the machine of the shard that has the name. A shard that is dropped although the register still names it
    is absent: its drop is under way, or was interrupted."""
    while True:
        found = await consensus.head(REGISTER_PREFIX + name)
        created = None if found is None else _decode_registration(name, found)
        if not isinstance(created, Create):
            if wanted is None:
                break
            created = await _create(consensus, rand, Create(name, rand.uuid(), wanted), found)
        machine = await open_machine(consensus, rand, created)
        if not machine.state.dropped:
            return machine
        await machine.aclose()
        if wanted is None:
            break
        await unregister(consensus, rand, name, created.shard_id)
    raise MissingError(f"no such table: table={name}.", fix="See `tidemill table list`.")


async def _evolve(machine: ShardMachine, wanted: ShardSchema, clock: Clock) -> None:
    """Evolve until the shard has every column of `wanted`.

    Racing processes may be first, and want more or fewer columns.
    """
    while True:
        seen = machine.state.schema
        try:
            changes = schema_changes(seen, wanted)
        except InvalidError as error:
            name = machine.state.name
            raise InvalidError(
                f"table exists with another schema: table={name} difference=[{describe_difference(seen, wanted)}].",
                fix="New columns and wider types are added automatically. Otherwise use another table, or drop it; a"
                f" pipeline re-creates it from its source, {AS_RETAINED}: {drop_table_command(name)}",
            ) from error
        if not changes:
            return
        result = await machine.propose(Evolve(changes, clock.now_ms()))
        if (
            isinstance(result, RejectedCommand)
            and result.reason is not RejectionReason.COMMITTED
            and machine.state.schema == seen
        ):
            raise rejection_error(result, machine.state)


async def read_shards(consensus: Consensus) -> list[ShardState]:
    """Return the current states of all shards in name order, without writing."""
    replicas = [shard_replica(consensus, created.shard_id) for created in await list_created_shards(consensus)]
    states = await asyncio.gather(*(replica.load() for replica in replicas))
    return [state for state in states if state is not None and not state.dropped]


async def read_shard(consensus: Consensus, name: str) -> ShardState | None:
    """Return the current state of one shard, without writing; None if there is no shard of this name."""
    found = await read_registration(consensus, name)
    if found is None or not isinstance(found[0], Create):
        return None
    state = await shard_replica(consensus, found[0].shard_id).load()
    return None if state is None or state.dropped else state


async def list_created_shards(consensus: Consensus) -> list[Create]:
    """Return the register contents of every shard that was not dropped, in name order."""
    return [created for _, created in await read_registrations(consensus) if isinstance(created, Create)]


async def read_registrations(consensus: Consensus) -> list[tuple[str, Create | Drop]]:
    """Return every name ever used, in order, with its creation or drop."""
    found = await consensus.scan(REGISTER_PREFIX)
    return [
        (key[len(REGISTER_PREFIX) :], _decode_registration(key[len(REGISTER_PREFIX) :], version))
        for key, version in found
    ]


async def read_registration(consensus: Consensus, name: str) -> tuple[Create | Drop, Versioned] | None:
    """Return the contents and version of the name's register; None if there never was such a shard."""
    found = await consensus.head(REGISTER_PREFIX + name)
    return None if found is None else (_decode_registration(name, found), found)


async def shard_exists(consensus: Consensus, name: str) -> bool:
    """Return whether there is a shard of this name. Raises CorruptError."""
    found = await read_registration(consensus, name)
    return found is not None and isinstance(found[0], Create)


async def unregister(consensus: Consensus, rand: Rand, name: str, shard_id: str) -> None:
    """Free the name of shard `shard_id`; another shard under that name is left unchanged."""
    while True:
        found = await read_registration(consensus, name)
        if found is None or not isinstance(found[0], Create) or found[0].shard_id != shard_id:
            return
        with contextlib.suppress(ConflictError, UnknownOutcomeError):  # the next read of the register decides
            await consensus.cas(REGISTER_PREFIX + name, found[1].seq, encode_command(Drop(shard_id)), rand.nonce())


async def drop_shard(
    consensus: Consensus, objects: ObjectStore, clock: Clock, rand: Rand, created: Create
) -> ShardState:
    """Drop the shard that `created` made; return its state before.

    If it was dropped already, an interrupted drop is completed and its name freed. Another shard under the name is left
    unchanged. Raises UnavailableError, UnknownOutcomeError: call it again.
    """
    shard = LogShard(await open_machine(consensus, rand, created), objects, clock, rand)
    try:
        held = shard.state
        await shard.drop()
        await unregister(consensus, rand, created.name, created.shard_id)
        await shard.rollup()
    finally:
        await shard.aclose()
    return held


async def open_remap(consensus: Consensus, clock: Clock, rand: Rand, name: str) -> LogRemap:
    """Open the bindings of one source (`capture/<name>`, `topic/<name>`). An unwritten one is empty."""
    if not name or name.startswith("/") or name.endswith("/"):
        raise InvalidError(f"bad remap name: remap={name!r}.", fix="Use capture/<name> or topic/<name>.")
    return LogRemap(consensus, name, clock, rand)


async def _create(consensus: Consensus, rand: Rand, create: Create, dropped: Versioned | None) -> Create:
    """Write the register once; the first writer decides. An unknown outcome is looked up, never guessed."""
    try:
        seq = 0 if dropped is None else dropped.seq
        await consensus.cas(REGISTER_PREFIX + create.name, seq, encode_command(create), rand.nonce())
        return create
    except (ConflictError, UnknownOutcomeError) as error:
        found = await read_registration(consensus, create.name)
        if found is None or not isinstance(found[0], Create):
            raise UnknownOutcomeError(
                f"the outcome of the creation is unknown: table={create.name}.", fix="Open the table again."
            ) from error
        return found[0]


def _decode_registration(name: str, version: Versioned) -> Create | Drop:
    command = decode_command(version.data)
    if not isinstance(command, Create | Drop):
        raise CorruptError(f"the table's register is not a creation: table={name} seq={version.seq}.")
    return command


def tombstones_name(table: str, shard_id: str) -> str:
    """Return the name of the shard with the tombstones of a table (RFC 0013). A table of the same name that is created
    later has another one."""
    return f"{table}{_TOMBSTONES}{shard_id}"


def table_of_tombstones(name: str) -> tuple[str, str]:
    """Return (name, id) of the table whose tombstones the shard `name` has; ("", "") if it has none."""
    table, marker, shard_id = name.rpartition(_TOMBSTONES)
    return (table, shard_id) if marker and len(shard_id) == _ID_LENGTH else ("", "")


async def list_tombstones(consensus: Consensus, table: str, *, but: str = "") -> list[Create]:
    """Return the shards of tombstones of tables of this name, except that of the table with the id `but`."""
    return [
        created
        for created in await list_created_shards(consensus)
        if created.name.startswith(table)
        and table_of_tombstones(created.name)[0] == table
        and table_of_tombstones(created.name)[1] != but
    ]


def check_shard_name(name: str) -> None:
    if not name or len(name) > NAME_LENGTH or not set(name) <= NAME_CHARS or name in (".", ".."):
        raise InvalidError(f"bad table name: table={name!r}.", fix="Use 1 to 200 of a-z A-Z 0-9 . _ -")
