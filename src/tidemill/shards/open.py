"""Opening by name. A shard's register `shard/<name>` decides, once, its id and schema; its log holds the rest.

register shard/<name>     the encoded Create command (codec): first writer wins
log      shard/<shard id> commands; the first is that same Create, put there by whoever opens first
"""

from __future__ import annotations

import asyncio

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Conflict, Corrupt, Invalid, Missing, Unknown
from tidemill.consensus.api import Consensus, Versioned
from tidemill.objects.store import ObjectStore
from tidemill.shards.codec import decode_command, encode_command
from tidemill.shards.commands import Create
from tidemill.shards.cpu import Cpu, inline_cpu
from tidemill.shards.front import ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.machine import ShardMachine, open_machine
from tidemill.shards.remap import LogRemap
from tidemill.shards.schema import checked, difference

PREFIX = "shard/"
NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
NAME_LENGTH = 200


class ShardInfo(msgspec.Struct, frozen=True):
    """One line of `tidemill shard list`."""

    name: str
    schema: ShardSchema
    since: int
    upper: int
    batches: int
    rows: int
    """Updates stored, not rows live."""
    bytes: int
    shard_id: str
    closed: bool


async def open_shard(
    consensus: Consensus,
    objects: ObjectStore,
    clock: Clock,
    rand: Rand,
    name: str,
    schema: ShardSchema | None = None,
    *,
    writer: str = "",
    cpu: Cpu = inline_cpu,
) -> LogShard:
    """The shard's handle; with `schema` it is created when absent.

    Raises Missing (absent and no schema given), Invalid (bad name or schema, or it exists with another schema:
    the message has the difference), Unavailable, Unknown.
    """
    _check_name(name)
    wanted = None if schema is None else checked(schema)
    found = await consensus.head(PREFIX + name)
    if found is None:
        if wanted is None:
            raise Missing(f"no such shard: shard={name}.", fix="See `tidemill shard list`.")
        found = await _create(consensus, rand, Create(name, rand.uuid(), wanted))
    created = _created(name, found)
    if wanted is not None and wanted != created.schema:
        raise Invalid(
            f"shard exists with another schema: shard={name} difference=[{difference(created.schema, wanted)}].",
            fix="Give the pipeline another shard name, or keep the schema.",
        )
    machine = await open_machine(consensus, rand, created)
    return LogShard(machine, objects, clock, rand, writer=writer, cpu=cpu)


async def list_shards(consensus: Consensus, rand: Rand | None = None) -> list[ShardInfo]:
    """All shards in name order, as of now."""
    rand = rand or Rand()
    machines = await asyncio.gather(*(open_machine(consensus, rand, c) for c in await created_shards(consensus)))
    return [describe(m) for m in machines]


async def created_shards(consensus: Consensus) -> list[Create]:
    """What every shard's register says, in name order."""
    return [_created(key[len(PREFIX) :], version) for key, version in await consensus.scan(PREFIX)]


def describe(machine: ShardMachine) -> ShardInfo:
    s = machine.state
    return ShardInfo(s.name, s.schema, s.since, s.upper, len(s.batches), s.rows, s.size_bytes, s.shard_id, s.closed)


async def open_remap(consensus: Consensus, clock: Clock, rand: Rand, name: str) -> LogRemap:
    """The bindings of one source (`capture/<name>`, `topic/<name>`). An unwritten one is simply empty."""
    if not name or name.startswith("/") or name.endswith("/"):
        raise Invalid(f"bad remap name: remap={name!r}.", fix="Use capture/<name> or topic/<name>.")
    return LogRemap(consensus, name, clock, rand)


async def _create(consensus: Consensus, rand: Rand, create: Create) -> Versioned:
    """Write the register once; whoever was first decides. An unknown outcome is looked up, never guessed."""
    key = PREFIX + create.name
    try:
        return await consensus.cas(key, 0, encode_command(create), rand.nonce())
    except (Conflict, Unknown) as error:
        found = await consensus.head(key)
        if found is None:
            raise Unknown(f"creation is not settled: shard={create.name}.", fix="Open it again.") from error
        return found


def _created(name: str, version: Versioned) -> Create:
    command = decode_command(version.data)
    if not isinstance(command, Create):
        raise Corrupt(f"shard register is no creation: shard={name} seq={version.seq}.")
    return command


def _check_name(name: str) -> None:
    if not name or len(name) > NAME_LENGTH or not set(name) <= NAME_CHARS or name in (".", ".."):
        raise Invalid(f"bad shard name: shard={name!r}.", fix="Use 1 to 200 of a-z A-Z 0-9 . _ -")
