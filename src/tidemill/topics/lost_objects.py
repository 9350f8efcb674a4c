"""L0 objects that are missing from the bucket for good, and the stand-ins of those that an operator has dropped.

Invariant (no silent loss): nothing skips a lost object automatically. A process that needs it reports an error and
waits. An operator drops it, by name, by writing a stand-in under its key; the stand-in is created only if the key does
not exist.

A partition skips the batches of a stand-in when they would move to L1: their offsets are a gap there. After that no log
names the stand-in, and it is collected like any other object.

Invariant (unreadable stand-in): a stand-in is shorter than any batch, so nothing can be read from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from tidemill.base.errors import ConflictError, MissingError
from tidemill.objects.store import ObjectStore
from tidemill.topics.l0.format import PREFIX, encode_footer
from tidemill.topics.partition.state_machine.state import PartitionState

STAND_IN: Final = b"let go\n" + encode_footer(())


class LostRange(msgspec.Struct, frozen=True):
    """Offsets [start, end) of a partition whose batches are partly or wholly in a lost object.

    `drop_lost_object`: its stand-in exists.
    """

    partition: int
    object_key: str
    start: int
    end: int
    batches: int
    let_go: bool


async def is_dropped(objects: ObjectStore, key: str) -> bool:
    return await _check_stand_in(objects, key) is True


async def drop_lost_object(objects: ObjectStore, key: str) -> None:
    """Write the stand-in of a lost object. Idempotent. Raises ConflictError if the object exists."""
    try:
        await objects.put(key, STAND_IN)
    except ConflictError:
        if not await is_dropped(objects, key):
            raise


async def lost_ranges(objects: ObjectStore, states: Iterable[tuple[int, PartitionState]]) -> list[LostRange]:
    """List the lost objects of a topic's partitions, given with their states, one range per partition and object."""
    known: dict[str, bool | None] = {}
    found: list[LostRange] = []
    for partition, state in states:
        for key in sorted(key for key in state.live_objects() if key.startswith(PREFIX)):
            if key not in known:
                known[key] = await _check_stand_in(objects, key)
            gone = known[key]
            if gone is None:
                continue
            refs = [ref for ref in map(state.batch_ref, range(len(state))) if ref.object_key == key]
            end = refs[-1].base_offset + refs[-1].record_count
            found.append(LostRange(partition, key, refs[0].base_offset, end, len(refs), gone))
    return found


async def _check_stand_in(objects: ObjectStore, key: str) -> bool | None:
    """Return None if the object exists, False if it is missing, True if its stand-in exists."""
    found = await objects.head(key)
    if found is None:
        return False
    if found.size_bytes != len(STAND_IN):
        return None
    try:
        return True if await objects.get(key) == STAND_IN else None
    except MissingError:
        return False
