"""Plan the requests for a set of ranged reads of one object: near ranges are read in one request.

Pure planning. A gap is read and discarded if that is cheaper than another request. Merging never makes a request larger
than `max_bytes`, so a large set is still spread over several connections.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.base.limits import COALESCE_GAP_BYTES, MIB

REQUEST_BYTES_MAX = 8 * MIB


class RangeRequest(msgspec.Struct, frozen=True):
    """One read of [start, end). `wanted`: (index in the caller's list, start, end) of the ranges inside it."""

    start: int
    end: int
    wanted: tuple[tuple[int, int, int], ...]


def plan_reads(
    ranges: Sequence[tuple[int, int]],
    gap_bytes: int = COALESCE_GAP_BYTES,
    max_bytes: int = REQUEST_BYTES_MAX,
) -> list[RangeRequest]:
    """Plan requests in order of start. Ranges may overlap, repeat, be empty, and have any order."""
    requests: list[RangeRequest] = []
    start = end = -1
    wanted: list[tuple[int, int, int]] = []
    for low, high, index in sorted((low, high, index) for index, (low, high) in enumerate(ranges)):
        joins = wanted and low - end <= gap_bytes and max(end, high) - start <= max_bytes
        if wanted and not joins:
            requests.append(RangeRequest(start, end, tuple(wanted)))
            wanted = []
        if not wanted:
            start, end = low, high
        wanted.append((index, low, high))
        end = max(end, high)
    if wanted:
        requests.append(RangeRequest(start, end, tuple(wanted)))
    return requests


def split_response(request: RangeRequest, data: bytes, into: list[bytes]) -> None:
    """Store the wanted pieces of one answered request at their indexes in `into`."""
    whole = len(request.wanted) == 1 and len(data) == request.end - request.start
    for index, low, high in request.wanted:
        into[index] = data if whole else data[low - request.start : high - request.start]
