"""Rules of bindings: which time a record gets, and which times a minter may choose. Pure.

Invariant (progress): times grow; no partition's offset ever goes back, and no LSN within one era (RFC 0010).

Invariant (determinism): a record gets the smallest time whose offsets are beyond it, for every reader, forever.

A binding at time t makes the data's upper t + 1: everything up to and including t is then known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from msgspec.structs import replace

from tidemill.base.errors import InvalidError
from tidemill.shards.api import Binding


def complete_binding(latest: Binding | None, binding: Binding) -> Binding:
    """Return the binding, completed from the latest by the fields that it does not name: a binding is always
    complete.
    """
    if latest is None:
        return binding
    return replace(
        binding,
        offsets={**latest.offsets, **binding.offsets} if binding.offsets else latest.offsets,
        lsn=binding.lsn or latest.lsn,
        era=binding.era if binding.lsn else latest.era,
        source_time_ms=binding.source_time_ms or latest.source_time_ms,
    )


def check_binding(binding: Binding) -> None:
    """Check a binding without its history. Raises InvalidError."""
    if binding.time_ms < 0 or binding.lsn < 0:
        raise InvalidError(f"a binding cannot be negative: time_ms={binding.time_ms} lsn={binding.lsn}.")
    for topic, offsets in binding.offsets.items():
        if not offsets or min(offsets) < 0:
            raise InvalidError(f"bad offsets in a binding: topic={topic} offsets={offsets}.")


def ordering_error(latest: Binding | None, binding: Binding) -> str:
    """Return why the binding would break the progress invariant as the next one, or ""."""
    if latest is None:
        return ""
    if binding.time_ms <= latest.time_ms:
        return f"time_ms={binding.time_ms} latest={latest.time_ms}"
    if (binding.era, binding.lsn) < (latest.era, latest.lsn):
        return f"lsn={binding.lsn} era={binding.era} latest={latest.lsn} its_era={latest.era}"
    for topic, old in latest.offsets.items():
        new = binding.offsets.get(topic, ())
        if len(new) < len(old) or any(n < o for n, o in zip(new, old, strict=False)):
            return f"topic={topic} offsets={new} latest={old}"
    return ""


def binding_in_force(bindings: Sequence[Binding], time_ms: int) -> Binding | None:
    """Return the newest binding with time ≤ time_ms, or None."""
    at = bisect_right(bindings, time_ms, key=lambda b: b.time_ms)
    return bindings[at - 1] if at else None


def bindings_after(bindings: Sequence[Binding], time_ms: int, limit: int) -> list[Binding]:
    at = bisect_right(bindings, time_ms, key=lambda b: b.time_ms)
    return list(bindings[at : at + limit])


def missing_offsets(latest: Binding | None, seen: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the part of `seen` (topic → next offsets) that no binding covers yet, per topic the elementwise maximum.

    {} = nothing is missing. The loser of a mint calls this with the winner's binding, and mints only the rest.
    """
    out = {}
    for topic, offsets in seen.items():
        old = latest.offsets.get(topic, ()) if latest is not None else ()
        whole = tuple(max(n, old[i] if i < len(old) else 0) for i, n in enumerate(offsets)) + old[len(offsets) :]
        if whole != old:
            out[topic] = whole
    return out
