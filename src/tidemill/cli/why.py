"""`tidemill why NAME`: the chain of holders from a mark to its root."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.base.errors import Missing
from tidemill.base.marks import State, as_row
from tidemill.base.marks import why as walk
from tidemill.cli.context import ConfigOption, JsonOption, print_json, stores
from tidemill.cli.status import EXIT_BY_STATE, read_marks

Name = Annotated[
    str, typer.Argument(help="A mark, as `tidemill status` names it, or a table's name. Empty = the worst.")
]


def why(name: Name = "", config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Say who holds a stage back, down to the root."""
    with stores(config) as opened:
        marks = read_marks(opened)
    if not name and marks:
        rank = {State.STUCK: 0, State.BLIND: 1, State.WAITING: 2, State.MOVING: 3, State.IDLE: 4}
        name = min(marks, key=lambda n: (rank[marks[n].state], -marks[n].standing_ms))
    for candidate in (name, f"shard:{name}", f"topic:{name}", f"capture:{name}", f"pipeline:{name}"):
        if candidate in marks:
            name = candidate
            break
    else:
        raise Missing(
            f"no such mark: name={name!r}.", fix=f"Known: {', '.join(sorted(marks)) or 'none; is a node up?'}"
        )
    chain = walk(marks, name)
    root = chain[-1].mark.held_by
    if as_json:
        print_json({"chain": [as_row(d) for d in chain], "root": root})
    else:
        for depth, derived in enumerate(chain):
            mark = derived.mark
            arrow = "  " * depth + ("← " if depth else "")
            behind = f"{max(0, mark.target - mark.position):,} {mark.unit} behind".replace("  ", " ")
            print(
                f"{arrow}{mark.name}  {derived.state} for {derived.standing_ms / 1000:.1f} s, {behind}  {mark.reason}"
            )
        if root:
            print("  " * len(chain) + f"← {root}")
    raise SystemExit(EXIT_BY_STATE.get(chain[0].state, 0))
