"""Cache of plans by request: a live client repeats the same request for as long as it follows a shape.

A plan is cached for shapes that exist, and is removed with its shape. The cache is bounded twice: `capacity` plans in
all, beyond which all are dropped, and a few requests per definition, since clients may spell one definition in many
ways.
"""

from __future__ import annotations

from tidemill.shapes.definition.definition import ShapeDefinition
from tidemill.shapes.definition.planner import Plan, ShapeRequest
from tidemill.shapes.shape_sizes import clause_bytes

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
            self.clear()
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

    def clear(self) -> None:
        self._plans, self._requests = {}, {}
