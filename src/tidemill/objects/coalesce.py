"""Which requests serve a set of ranged reads of one object: near ranges travel together.

Pure planning. A gap is read and thrown away when it is cheaper than another request; one request
never grows past `max_bytes` by merging, so a large set still spreads over several connections.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.base.limits import COALESCE_GAP_BYTES, MIB

REQUEST_BYTES_MAX = 8 * MIB


class Request(msgspec.Struct, frozen=True):
    """Read [start, end) once; `wanted` are (index in the caller's list, start, end), all inside it."""

    start: int
    end: int
    wanted: tuple[tuple[int, int, int], ...]


def plan_reads(
    ranges: Sequence[tuple[int, int]],
    gap_bytes: int = COALESCE_GAP_BYTES,
    max_bytes: int = REQUEST_BYTES_MAX,
) -> list[Request]:
    """Requests in order of start. Ranges may overlap, repeat, be empty and come in any order."""
    requests: list[Request] = []
    start = end = -1
    wanted: list[tuple[int, int, int]] = []
    for low, high, index in sorted((low, high, index) for index, (low, high) in enumerate(ranges)):
        joins = wanted and low - end <= gap_bytes and max(end, high) - start <= max_bytes
        if wanted and not joins:
            requests.append(Request(start, end, tuple(wanted)))
            wanted = []
        if not wanted:
            start, end = low, high
        wanted.append((index, low, high))
        end = max(end, high)
    if wanted:
        requests.append(Request(start, end, tuple(wanted)))
    return requests


def cut(request: Request, data: bytes, into: list[bytes]) -> None:
    """Place the wanted pieces of one answered request at their indexes."""
    whole = len(request.wanted) == 1 and len(data) == request.end - request.start
    for index, low, high in request.wanted:
        into[index] = data if whole else data[low - request.start : high - request.start]
