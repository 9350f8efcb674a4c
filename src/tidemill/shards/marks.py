"""A shard's mark: position = upper, target = the time its inputs have reached."""

from __future__ import annotations

from tidemill.base.marks import Tracker


def mark_shard(
    tracker: Tracker, name: str, upper: int, target: int, *, now_ms: int, held_by: str = "", reason: str = ""
) -> None:
    """`target` is one past the newest time bound upstream (its remap's latest binding + 1); both are times in ms."""
    tracker.set(f"shard:{name}", upper, target, now_ms=now_ms, held_by=held_by, reason=reason, unit="ms")
