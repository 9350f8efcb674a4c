"""The register that names a table's newest metadata: `lake/<id of the table>`.

A publication is this register's compare-and-set, so of two that race one wins. The register of a dropped table stays,
marked: a publication that was prepared before the drop is then refused, too.

Interface for readers of published tables: `load_table`.
"""

from __future__ import annotations

import msgspec

from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, CorruptError, MissingError, UnknownOutcomeError
from tidemill.consensus.api import Consensus
from tidemill.lake.settings import PREFIX
from tidemill.objects.store import ObjectStore
from tidemill.shards.registry import read_registration
from tidemill.shards.state.commands import Create


class Pointer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Newest publication of a table.

    metadata      key of the metadata file
    time_ms       time of the contents
    published_ms  when it was published
    rows          rows at that time
    swept_ms      objects written before it, and named by no listed snapshot, may be deleted
    dropped       the table does not exist any more
    """

    name: str
    metadata: str = ""
    snapshot_id: int = 0
    time_ms: int = 0
    published_ms: int = 0
    rows: int = 0
    swept_ms: int = 0
    dropped: bool = False


class LoadedTable(msgspec.Struct, frozen=True):
    """Newest metadata of a table: its URI, and its bytes (JSON)."""

    location: str
    metadata: bytes
    pointer: Pointer


async def load_table(consensus: Consensus, objects: ObjectStore, name: str) -> LoadedTable:
    """Return the newest publication of the table `name`: what a catalogue answers to "load table".

    Raises MissingError (no such table, or never published), CorruptError, UnavailableError.
    """
    found = await read_registration(consensus, name)
    if found is None or not isinstance(found[0], Create):
        raise MissingError(f"no such table: table={name}.", fix="See `tidemill lake list`.")
    shard_id = found[0].shard_id
    pointer, _ = await read_pointer(consensus, shard_id)
    if pointer is None or not pointer.metadata:
        raise MissingError(f"the table was never published: table={name}.", fix=f"Run: tidemill lake publish {name}")
    data = await objects.get(pointer.metadata)
    location: str = msgspec.json.decode(data, type=_Location).location
    return LoadedTable(f"{location}/{pointer.metadata.removeprefix(f'{PREFIX}{shard_id}/')}", data, pointer)


class _Location(msgspec.Struct):
    location: str


async def read_pointer(consensus: Consensus, shard_id: str) -> tuple[Pointer | None, int]:
    """Return the pointer and the version of its register; (None, 0) before the first publication."""
    found = await consensus.head(PREFIX + shard_id)
    return (None, 0) if found is None else (decode_pointer(found.data, shard_id), found.seq)


async def list_pointers(consensus: Consensus) -> dict[str, tuple[Pointer, int]]:
    """Return the pointers of all tables with the versions of their registers, by the table's id."""
    found = {key.removeprefix(PREFIX): version for key, version in await consensus.scan(PREFIX)}
    return {shard_id: (decode_pointer(v.data, shard_id), v.seq) for shard_id, v in found.items()}


async def move_pointer(consensus: Consensus, rand: Rand, shard_id: str, seq: int, pointer: Pointer) -> int:
    """Move the register from version `seq` to `pointer`; return its new version.

    Raises ConflictError (another publication was first), UnavailableError, UnknownOutcomeError (the outcome could not
    be read).
    """
    key, nonce = PREFIX + shard_id, rand.nonce()
    try:
        return (await consensus.cas(key, seq, msgspec.json.encode(pointer), nonce)).seq
    except UnknownOutcomeError:
        found = await consensus.head(key)
        if found is not None and found.nonce == nonce:
            return found.seq
        raise ConflictError(
            f"the table was published by another process: table={pointer.name}.", current=found
        ) from None


def decode_pointer(data: bytes, shard_id: str) -> Pointer:
    try:
        return msgspec.json.decode(data, type=Pointer)
    except msgspec.DecodeError as error:
        raise CorruptError(f"the register of a published table is unreadable: id={shard_id} ({error}).") from error
