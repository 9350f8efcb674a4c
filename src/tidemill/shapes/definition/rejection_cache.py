"""Definitions that failed lately, and with what: asked for again they are refused at once, not tried at clients' pace.

A clause that fails on a row would else be compiled, loaded and ended again for every poll of its client. Pure.
"""

from __future__ import annotations

from tidemill.base.errors import InvalidError, MissingError, TidemillError
from tidemill.shapes.definition.definition import ShapeDefinition

REFUSED_S = 60.0
"""For what the request itself must change."""

BROKEN_S = 5.0
"""For a fault that nobody listed."""

AWAY_S = 1.0
"""For what may come back any moment."""

MOST = 1_000


class Refusals:
    def __init__(self) -> None:
        self._until: dict[ShapeDefinition, tuple[float, TidemillError]] = {}
        self.count = 0
        self.last = ""

    def add(self, definition: ShapeDefinition, error: TidemillError, now_s: float, *, broken: bool = False) -> None:
        wrong = isinstance(error, InvalidError) and not isinstance(error, MissingError)
        length = BROKEN_S if broken else REFUSED_S if wrong else AWAY_S
        self._until = {each: found for each, found in self._until.items() if now_s < found[0]}
        self._until.pop(definition, None)
        self._until[definition] = (now_s + length, _bare(error))
        if len(self._until) > MOST:
            del self._until[next(iter(self._until))]
        self.count += 1
        self.last = error.message

    def check(self, definition: ShapeDefinition, now_s: float) -> None:
        """Raises what the definition failed with, for as long as it is refused."""
        found = self._until.get(definition)
        if found is None:
            return
        if now_s < found[0]:
            raise _bare(found[1])
        del self._until[definition]

    def forget(self) -> None:
        """What made them fail may be different now."""
        self._until.clear()


def _bare(error: TidemillError) -> TidemillError:
    """The same without the frames that it passed: what they hold, a whole shard perhaps, would stay for as long."""
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    return made
