"""Freshness of a stage as seen from its source: the worst status on the path between them, and its blocker.

    shard:orders ──upstream──► table:shop/public.orders ──► capture:shop/topics ──upstream──► capture:shop
         │ process:pipeline:shop                │ process:node:node-1, objects, consensus

A stage at its target only shows that its input delivered nothing; only the input shows whether it works itself. So the
verdict on a table walks to its source, along `held_by` from a waiting stage and along `upstream` from others, and takes
the worst status on the path. The path includes the foundations of a stage in its own process (storage, consensus).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from tidemill.base.status.status import FOUNDATIONS, PROCESS, DerivedStatus, StageState, severity_of

SHARD = "shard:"
TABLE = "table:"
PIPELINE = "pipeline:"
REFUSED_SEPARATOR = ":table/"
"""Separator between the pipeline's and the table's name in the status of a table that a pipeline must not maintain."""

EXIT_BY_STATE = {StageState.STUCK: 3, StageState.BLIND: 3, StageState.WAITING: 1}
"""Exit codes of `why` and `status`: 0 fresh, 1 lagging, 3 stuck."""


class Verdict(msgspec.Struct, frozen=True):
    """Result of `verdict_of`.

    `chain` leads from the requested stage to its source. `worst` decides. `root` is the root cause: the name of a stage
    status, or an outside blocker in words.
    """

    chain: tuple[DerivedStatus, ...]
    worst: DerivedStatus
    root: str

    @property
    def exit_code(self) -> int:
        return EXIT_BY_STATE.get(self.worst.state, 0)


def verdict_of(marks: Mapping[str, DerivedStatus], name: str) -> Verdict:
    """Return the verdict on an existing stage status. Raises KeyError if there is no such status."""
    chain = tuple(walk_to_source(marks, name))
    # Among equally bad ones choose a foundation of a whole process, else the one nearest to the source, which causes
    # the others.
    worst = max(
        enumerate(chain), key=lambda item: (severity_of(item[1])[0], _is_foundation(item[1].mark.name), item[0])
    )[1]
    worst = _supervisors_finding(marks, worst)
    return Verdict(chain, worst, _root(marks, worst))


def _supervisors_finding(marks: Mapping[str, DerivedStatus], worst: DerivedStatus) -> DerivedStatus:
    """Return why a blind process does not run, if its supervisor reports that; otherwise `worst`."""
    name = worst.mark.name
    found = marks.get(name.removeprefix(PROCESS)) if name.startswith(PROCESS) else None
    return found if found is not None and found.state is StageState.STUCK and found.mark.error else worst


def _is_foundation(name: str) -> bool:
    return name.startswith(PROCESS) or name.partition("@")[0] in FOUNDATIONS


def walk_to_source(marks: Mapping[str, DerivedStatus], name: str) -> Iterator[DerivedStatus]:
    """Yield every status between `name` and its source, `name` first, each once."""
    open_names, seen = [name], set[str]()
    if name not in marks:
        raise KeyError(name)
    while open_names:
        here = _representative(marks, open_names.pop(0))
        if here in seen or here not in marks:
            continue
        seen.add(here)
        derived = marks[here]
        yield derived
        process = PROCESS + derived.process
        silent = process in marks and marks[process].state is StageState.BLIND
        # The supervisor of a driver that dies repeatedly reports it, under the driver's own name.
        restarted = [n for n, d in marks.items() if d.mark.error and n.partition("@")[0] == derived.process]
        for other in [*([process] if silent else [f"{stand}@{derived.process}" for stand in FOUNDATIONS]), *restarted]:
            if other not in seen and other in marks and marks[other].state is not StageState.IDLE:
                seen.add(other)
                yield marks[other]
        nexts = (derived.mark.held_by, derived.mark.upstream)
        open_names += [mark for mark in (nexts if derived.blocker else reversed(nexts)) if mark]
        if here.startswith("topic:"):
            open_names.append("binding:topic/" + here.removeprefix("topic:"))  # the source of times for its records


def _representative(marks: Mapping[str, DerivedStatus], name: str) -> str:
    """Return the status that stands for `name`.

    A captured table that is streaming has no separate status: it is where its capture's topics are. A table that its
    pipeline must not maintain is reported by that pipeline.
    """
    if name in marks:
        return name
    if name.startswith(SHARD):
        return _refusal(marks, name.removeprefix(SHARD)) or name
    if not name.startswith(TABLE):
        return name
    return f"capture:{name.removeprefix(TABLE).partition('/')[0]}/topics"


def _refusal(marks: Mapping[str, DerivedStatus], table: str) -> str:
    return min((m for m in marks if m.startswith(PIPELINE) and m.endswith(REFUSED_SEPARATOR + table)), default="")


def _root(marks: Mapping[str, DerivedStatus], worst: DerivedStatus) -> str:
    """Return the end of the walk along `held_by` from the worst status: an outside blocker, or the last status name."""
    seen: set[str] = set()
    here = worst
    while here.mark.name not in seen:
        seen.add(here.mark.name)
        holder = here.mark.held_by
        if not holder:
            return here.mark.name
        holder = _representative(marks, holder)
        if holder not in marks:
            return holder
        here = marks[holder]
    return here.mark.name


def resolve_status_name(marks: Mapping[str, DerivedStatus], name: str) -> str:
    """Return the status meant by `name`: a status's own name, a table, a topic, a capture, a pipeline.

    Raises KeyError.
    """
    kinds = (f"{kind}:{name}" for kind in ("table", "topic", "capture", "pipeline"))
    for candidate in (name, SHARD + name, _refusal(marks, name), *kinds):
        if candidate in marks:
            return candidate
    # A captured table that is not streaming, by its plain name: in any capture that has it.
    for mark in sorted(marks):
        if mark.startswith(TABLE) and mark.partition("/")[2] in (name, f"public.{name}"):
            return mark
    raise KeyError(name)
