"""Merge of the sorted scans of several domains. Keys are unique across domains, since each is routed to one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

Chunk = tuple[list[bytes], list[bytes]]


async def merge_scans(scans: Sequence[AsyncIterator[Chunk]], *, reverse: bool = False) -> AsyncIterator[Chunk]:
    """Yield chunks of (keys, values) in key order, descending if `reverse` (the scans must be descending then).

    In every step the scan whose current chunk ends first is drained, and the others up to that key: rows are never
    compared one by one.
    """
    if len(scans) == 1:
        async for chunk in scans[0]:
            yield chunk
        return
    heads: dict[int, list[tuple[bytes, bytes]]] = {}
    for index, scan in enumerate(scans):
        await _refill(heads, index, scan)
    while heads:
        first = max if reverse else min
        bound = first(rows[-1][0] for rows in heads.values())
        found: list[tuple[bytes, bytes]] = []
        for index, rows in list(heads.items()):
            count = sum(1 for key, _ in rows if (key >= bound if reverse else key <= bound))
            found += rows[:count]
            del rows[:count]
            if not rows:
                await _refill(heads, index, scans[index])
        found.sort(reverse=reverse)
        yield [key for key, _ in found], [value for _, value in found]


async def _refill(heads: dict[int, list[tuple[bytes, bytes]]], index: int, scan: AsyncIterator[Chunk]) -> None:
    async for keys, values in scan:
        if keys:
            heads[index] = list(zip(keys, values, strict=True))
            return
    heads.pop(index, None)
