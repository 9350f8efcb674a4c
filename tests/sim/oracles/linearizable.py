"""Check whether a sequential object could have produced a history of concurrent calls (Wing and Gong, 1993).

A history is checked per object: registers and logs are independent, so a whole store is linearizable if each of them
is. A call whose outcome its caller never learned may take effect at any moment after its start, or never. The search
remembers (set of placed calls, state), which keeps small histories cheap: five clients with a thousand calls take a
quarter of a second when most outcomes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import msgspec

NEVER = float("inf")


class Call(msgspec.Struct):
    """One call. `known` is False if the caller got no reliable answer; `end` is then NEVER."""

    client: str
    operation: Hashable
    start: float
    end: float = NEVER
    result: Any = None
    known: bool = False


Model = Callable[[Hashable, Hashable], tuple[Hashable, Any]]
"""(state, operation) → (next state, the result of a sequential object)."""


def linearizable(calls: Sequence[Call], initial: Hashable, model: Model) -> bool:
    order = sorted(calls, key=lambda call: call.start)
    everything = sum(1 << i for i, call in enumerate(order) if call.known)
    tried: set[tuple[int, Hashable]] = set()
    # An explicit stack, because histories are longer than Python's recursion limit.
    stack: list[tuple[int, Hashable]] = [(0, initial)]
    while stack:
        placed, state = stack.pop()
        if placed & everything == everything:
            return True
        if (placed, state) in tried:
            continue
        tried.add((placed, state))
        # A call can come next if it began before every unplaced known call ended.
        horizon = min(call.end for i, call in enumerate(order) if not placed >> i & 1)
        for i, call in enumerate(order):
            if call.start > horizon:
                break
            if placed >> i & 1:
                continue
            following, result = model(state, call.operation)
            # An unknown call that changes nothing need not be placed: it may as well never take effect.
            if result == call.result if call.known else following != state:
                stack.append((placed | 1 << i, following))
    return False


def register_model(state: Hashable, operation: Hashable) -> tuple[Hashable, Any]:
    """State: (seq, data). Operations: ("read",), ("cas", expected seq, data); a rejected cas returns the state."""
    match operation:
        case ("read",):
            return state, state
        case ("cas", int(expected), bytes(data)):
            seq, _ = cast("tuple[int, bytes]", state)
            if seq != expected:
                return state, ("conflict", state)
            return (seq + 1, data), ("ok", seq + 1)
    raise AssertionError(f"unknown operation: {operation}")


def log_model(state: Hashable, operation: Hashable) -> tuple[Hashable, Any]:
    """State: (term, records). Operations: ("read",), ("fence", term), ("append", term, expected, records)."""
    term, records = cast("tuple[int, tuple[bytes, ...]]", state)
    match operation:
        case ("read",):
            return state, (term, records)
        case ("fence", int(wanted)):
            return (state, ("fenced", term)) if wanted < term else ((wanted, records), ("ok", wanted))
        case ("append", int(mine), int(expected), tuple(added)):
            if mine < term:
                return state, ("fenced", term)
            if expected != len(records):
                return state, ("conflict", len(records))
            return (mine, records + added), ("ok", expected + len(added))
    raise AssertionError(f"unknown operation: {operation}")
