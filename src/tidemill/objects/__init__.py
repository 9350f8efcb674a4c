"""objects: immutable objects in a bucket, a directory or memory.

    caller ─► retrying (concurrency, retries, classification of failures) ─► buckets | local | memory
    factory: URL ─► store;  reads: for readers;  health: the state of a store;  probe: `tidemill doctor`

Owns key rules, durable and conditional creation, ranged reads, bounded concurrency, retries with a time budget, and the
translation of every failure into `base.errors`. Does not own what an object means, its format, or when it may be
deleted.

- Invariant (immutable): an object never changes, and its key is never used again.
- Invariant (durable): an acknowledged put survives power loss.
- Invariant (create once): `put` of an existing key raises ConflictError and changes nothing. Of N racing creates one
  wins, and a writer whose acknowledgement was lost never gets a ConflictError with its own object.
- Invariant (certain errors): UnavailableError means that the call had no effect. If it may have had one, the error is
  UnknownOutcomeError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidemill.objects.store import Buffer, ObjectMeta, ObjectStore

if TYPE_CHECKING:
    from tidemill.objects.factory import open_objects
    from tidemill.objects.memory import MemoryObjects

__all__ = ["Buffer", "MemoryObjects", "ObjectMeta", "ObjectStore", "open_objects"]


def __getattr__(name: str) -> Any:
    """Import the backends on demand: most of the package needs only the contract."""
    if name == "MemoryObjects":
        from tidemill.objects.memory import MemoryObjects

        return MemoryObjects
    if name == "open_objects":
        from tidemill.objects.factory import open_objects

        return open_objects
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
