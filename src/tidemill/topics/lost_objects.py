"""L0 objects that are gone from the bucket for good, and what stands in the place of one that was let go.

LO1  Nothing is passed over by itself: whoever needs a lost object is told, and waits. An operator lets it go, by name,
     with a stand-in under its key, which is created only while nothing is there.
LO2  A partition passes over the batches of a stand-in when it moves into L1: their offsets are a gap there. Then no
     log names it, and it is collected as any other object.
LO3  A stand-in is shorter than any batch: nothing can be read from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from tidemill.base.errors import ConflictError, MissingError
from tidemill.objects.store import ObjectStore
from tidemill.topics.l0.format import PREFIX, encode_footer
from tidemill.topics.partition.state import PartitionState

STAND_IN: Final = b"let go\n" + encode_footer(())


class LostRange(msgspec.Struct, frozen=True):
    """Offsets [start, end) of a partition, of which the object holds some or all. `let_go`: its stand-in is there."""

    partition: int
    object_key: str
    start: int
    end: int
    batches: int
    let_go: bool


async def is_let_go(objects: ObjectStore, key: str) -> bool:
    return await _looked_at(objects, key) is True


async def let_go(objects: ObjectStore, key: str) -> None:
    """Idempotent. Raises ConflictError where the object is there."""
    try:
        await objects.put(key, STAND_IN)
    except ConflictError:
        if not await is_let_go(objects, key):
            raise


async def lost_ranges(objects: ObjectStore, states: Iterable[tuple[int, PartitionState]]) -> list[LostRange]:
    """Of the partitions of a topic, with their states: one for each object that is gone."""
    known: dict[str, bool | None] = {}
    found: list[LostRange] = []
    for partition, state in states:
        for key in sorted(key for key in state.live_objects() if key.startswith(PREFIX)):
            if key not in known:
                known[key] = await _looked_at(objects, key)
            gone = known[key]
            if gone is None:
                continue
            refs = [ref for ref in map(state.ref, range(len(state))) if ref.object_key == key]
            end = refs[-1].base_offset + refs[-1].record_count
            found.append(LostRange(partition, key, refs[0].base_offset, end, len(refs), gone))
    return found


async def _looked_at(objects: ObjectStore, key: str) -> bool | None:
    """None: it is there. False: it is gone. True: it was let go."""
    found = await objects.head(key)
    if found is None:
        return False
    if found.size_bytes != len(STAND_IN):
        return None
    try:
        return True if await objects.get(key) == STAND_IN else None
    except MissingError:
        return False
