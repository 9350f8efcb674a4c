"""Histories of a table as a strategy of Hypothesis."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st

from support.shards.world import Row


@st.composite
def histories(draw: st.DrawFn, keyed: bool) -> list[list[list[Row]]]:
    """Batches of parts of updates that a shard may hold: what a row loses it had, in any part or batch; with a key,
    one live row a key, and one change of it at a time."""
    live: Counter[tuple[int | None, str | None]] = Counter()
    changed: dict[int | None, int] = {}
    out: list[list[list[Row]]] = []
    time = 0
    for _ in range(draw(st.integers(1, 4))):
        pieces: list[list[Row]] = [[] for _ in range(draw(st.integers(1, 3)))]
        for _ in range(draw(st.integers(0, 10))):
            row = (draw(st.none() | st.integers(0, 5)), draw(st.none() | st.sampled_from("ab")))
            time += 1 if keyed and changed.get(row[0]) == time else draw(st.integers(0, 1))
            changed[row[0]] = time
            gone = [r for r in +live if r[0] == row[0]] if keyed else [row] * (live[row] > 0 and draw(st.booleans()))
            said = [(r, -1) for r in gone]
            if not gone or (keyed and draw(st.booleans())):
                said.append((row, 1 if keyed else draw(st.sampled_from([1, 1, 2]))))
            for r, diff in said:
                live[r] += diff
                pieces[draw(st.integers(0, len(pieces) - 1))].append((*r, time, diff))
        out.append(pieces)
        time += 1
    return out
