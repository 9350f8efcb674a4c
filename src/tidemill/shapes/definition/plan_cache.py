"""Caches of requests: the plans of live shapes, and definitions that failed recently.

A live client repeats the same request for as long as it follows a shape. A plan is cached for shapes that exist, and is
removed with its shape. The cache is bounded twice: `capacity` plans in all, beyond which all are dropped, and a few
requests per definition, since clients may spell one definition in many ways.

Requests for a definition that failed are rejected immediately instead of being tried again. Without it, a clause that
fails on a row would be compiled, loaded and ended again for every poll of its client.
"""

from __future__ import annotations

from tidemill.base.errors import InvalidError, MissingError, TidemillError
from tidemill.shapes.definition.definition import ShapeDefinition, clause_bytes
from tidemill.shapes.definition.planner import Plan, ShapeRequest

MAX_PLANS_PER_DEFINITION = 4
LARGE_CLAUSE_BYTES = 1_000
"""Size of a clause above which only one request per definition is cached."""


class PlanCache:
    """Plans of live shapes."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._plans: dict[ShapeRequest, Plan] = {}
        self._requests: dict[ShapeDefinition, list[ShapeRequest]] = {}
        """Requests of each definition that have an entry in `_plans`."""

    def __len__(self) -> int:
        return len(self._plans)

    def __contains__(self, request: ShapeRequest) -> bool:
        return request in self._plans

    def get(self, request: ShapeRequest) -> Plan | None:
        return self._plans.get(request)

    def put(self, request: ShapeRequest, plan: Plan) -> None:
        """Cache a plan, unless its definition has enough cached requests."""
        if len(self._plans) >= self._capacity:
            self._plans, self._requests = {}, {}
        if request not in self._plans:
            requests = self._requests.setdefault(plan.definition, [])
            if len(requests) >= (1 if clause_bytes(plan.definition) > LARGE_CLAUSE_BYTES else MAX_PLANS_PER_DEFINITION):
                return
            requests.append(request)
        self._plans[request] = plan

    def remove(self, definition: ShapeDefinition) -> None:
        """Remove the plans of a shape that has ended."""
        for request in self._requests.pop(definition, ()):
            self._plans.pop(request, None)


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

    def remove_database(self, name: str) -> None:
        """Remove the failures of a database's tables, because their causes may no longer hold."""
        self._until = {
            definition: found
            for definition, found in self._until.items()
            if definition.source.kind != "table" or definition.source.database != name
        }


def _without_traceback(error: TidemillError) -> TidemillError:
    """Return the same error without its traceback, whose frames could keep a whole shard in memory."""
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    return made
