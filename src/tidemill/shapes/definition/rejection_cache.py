"""Caches definitions that failed recently: repeated requests are rejected immediately instead of being tried again.

Without it, a clause that fails on a row would be compiled, loaded and ended again for every poll of its client. Pure.
"""

from __future__ import annotations

from tidemill.base.errors import InvalidError, MissingError, TidemillError
from tidemill.shapes.definition.definition import ShapeDefinition

INVALID_S = 60.0
"""Rejection time for errors of the request itself."""

UNEXPECTED_S = 5.0
"""Rejection time for unexpected exceptions."""

TEMPORARY_S = 1.0
"""Rejection time for temporary conditions."""

MAX_ENTRIES = 1_000


class RejectionCache:
    def __init__(self) -> None:
        self._until: dict[ShapeDefinition, tuple[float, TidemillError]] = {}
        self.count = 0
        self.last = ""

    def add(self, definition: ShapeDefinition, error: TidemillError, now_s: float, *, broken: bool = False) -> None:
        wrong = isinstance(error, InvalidError) and not isinstance(error, MissingError)
        length = UNEXPECTED_S if broken else INVALID_S if wrong else TEMPORARY_S
        self._until = {each: found for each, found in self._until.items() if now_s < found[0]}
        self._until.pop(definition, None)
        self._until[definition] = (now_s + length, _without_traceback(error))
        if len(self._until) > MAX_ENTRIES:
            del self._until[next(iter(self._until))]
        self.count += 1
        self.last = error.message

    def raise_if_rejected(self, definition: ShapeDefinition, now_s: float) -> None:
        """Raise the error of the definition if it failed recently."""
        found = self._until.get(definition)
        if found is None:
            return
        if now_s < found[0]:
            raise _without_traceback(found[1])
        del self._until[definition]

    def clear(self) -> None:
        """Clear the cache, because the causes may no longer hold."""
        self._until.clear()


def _without_traceback(error: TidemillError) -> TidemillError:
    """Return the same error without its traceback, whose frames could keep a whole shard in memory."""
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    return made
