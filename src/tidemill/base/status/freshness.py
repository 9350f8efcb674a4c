"""How fresh a stage is, looked at from its source: the worst of everything between them, and who holds it.

    shard:orders ──upstream──► table:shop/public.orders ──► capture:shop/topics ──upstream──► capture:shop
         │ process:pipeline:shop                │ process:node:node-1, objects, consensus

A stage that is at its target says only that its input brought nothing: whether its input is well is for the input to
say. So the verdict on a table walks to its source, along `held_by` where a stage waits and along `upstream` where it
does not, and takes the worst mark on the way. What a stage stands on in its own process (its storage, its consensus)
is on the way too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from tidemill.base.status.status import OWN, PROCESS, Derived, State, trouble

SHARD = "shard:"
TABLE = "table:"
PIPELINE = "pipeline:"
REFUSED = ":table/"
"""In the mark of a table that a pipeline may not keep, between the pipeline's and the table's name."""

EXIT_BY_STATE = {State.STUCK: 2, State.BLIND: 2, State.WAITING: 1}
"""0 fresh, 1 lagging, 2 stuck: of `why`, `status` and `/freshz`."""


class Verdict(msgspec.Struct, frozen=True):
    """`chain`: from the stage asked for to its source. `worst` decides; `root` is who is to be looked at, as a mark's
    name or an outside holder in words."""

    chain: tuple[Derived, ...]
    worst: Derived
    root: str

    @property
    def exit_code(self) -> int:
        return EXIT_BY_STATE.get(self.worst.state, 0)


def verdict(marks: Mapping[str, Derived], name: str) -> Verdict:
    """Of a mark that exists. Raises KeyError for one that does not."""
    chain = tuple(walk(marks, name))
    # Of equally bad ones what a whole process stands on, else the one nearest to the source: those behind it stand
    # because of it.
    worst = max(enumerate(chain), key=lambda item: (trouble(item[1])[0], _is_ground(item[1].mark.name), item[0]))[1]
    return Verdict(chain, worst, _root(marks, worst))


def _is_ground(name: str) -> bool:
    return name.startswith(PROCESS) or name.partition("@")[0] in OWN


def walk(marks: Mapping[str, Derived], name: str) -> Iterator[Derived]:
    """Every mark between `name` and its source, `name` first, none twice."""
    open_names, seen = [name], set[str]()
    if name not in marks:
        raise KeyError(name)
    while open_names:
        here = _stands_for(marks, open_names.pop(0))
        if here in seen or here not in marks:
            continue
        seen.add(here)
        derived = marks[here]
        yield derived
        process = PROCESS + derived.process
        silent = process in marks and marks[process].state is State.BLIND
        # A driver that dies again and again is told by who restarts it, under the driver's own name.
        restarted = [n for n in marks if n.partition("@")[0] == derived.process and marks[n].mark.error]
        for other in [*([process] if silent else [f"{stand}@{derived.process}" for stand in OWN]), *restarted]:
            if other not in seen and other in marks and marks[other].state is not State.IDLE:
                seen.add(other)
                yield marks[other]
        open_names += [mark for mark in (derived.mark.held_by, derived.mark.upstream) if mark]
        if here.startswith("topic:"):
            open_names.append("binding:topic/" + here.removeprefix("topic:"))  # who gives its records a time


def _stands_for(marks: Mapping[str, Derived], name: str) -> str:
    """A captured table that flows has no mark of its own: it is where its capture's topics are. A table that nobody
    keeps, for its pipeline may not, is told by that pipeline."""
    if name in marks:
        return name
    if name.startswith(SHARD):
        return _refusal(marks, name.removeprefix(SHARD)) or name
    if not name.startswith(TABLE):
        return name
    return f"capture:{name.removeprefix(TABLE).partition('/')[0]}/topics"


def _refusal(marks: Mapping[str, Derived], table: str) -> str:
    return min((m for m in marks if m.startswith(PIPELINE) and m.endswith(REFUSED + table)), default="")


def _root(marks: Mapping[str, Derived], worst: Derived) -> str:
    """Where walking `held_by` from the worst ends: an outside holder, or the name of the last mark."""
    seen: set[str] = set()
    here = worst
    while here.mark.name not in seen:
        seen.add(here.mark.name)
        holder = here.mark.held_by
        if not holder:
            return here.mark.name
        holder = _stands_for(marks, holder)
        if holder not in marks:
            return holder
        here = marks[holder]
    return here.mark.name


def table_mark(marks: Mapping[str, Derived], name: str) -> str:
    """The mark that `name` means: a mark's own name, a table, a topic, a capture, a pipeline. Raises KeyError."""
    kinds = (f"{kind}:{name}" for kind in ("table", "topic", "capture", "pipeline"))
    for candidate in (name, SHARD + name, _refusal(marks, name), *kinds):
        if candidate in marks:
            return candidate
    # A captured table that does not flow, by its own name: whichever capture has it.
    for mark in sorted(marks):
        if mark.startswith(TABLE) and mark.partition("/")[2] in (name, f"public.{name}"):
            return mark
    raise KeyError(name)
