"""Sorted scans of several domains as one. Keys are unique over domains, since each is routed to one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

Chunk = tuple[list[bytes], list[bytes]]


async def merged(scans: Sequence[AsyncIterator[Chunk]], *, reverse: bool = False) -> AsyncIterator[Chunk]:
    """Chunks of (keys, values) in key order, descending when `reverse` (as the scans must be then).

    In every step the scan whose chunk ends first gives all it has, the others what lies before that: no row is
    compared with another one by one.
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
