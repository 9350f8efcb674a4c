from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.base.clock import SystemClock
from tidemill.consensus.api import Changes, LogHead
from tidemill.consensus.change_journal import ChangedLogs, ChangeJournal
from tidemill.consensus.memory import MemoryConsensus
from tidemill.consensus.operations import Changed

NAMES = st.sampled_from(["a/1", "a/2", "a/:3", "a/é", "b/1", "b/2"])


class Engine:
    """A journal over heads in memory; `restart` discards the journal and retains the heads."""

    def __init__(self, remembered: int, page: int) -> None:
        self.heads: dict[str, LogHead] = {}
        self._sizes = (remembered, page)
        self._lives = 0
        self.restart()

    def restart(self) -> None:
        self._lives += 1
        self._journal = ChangeJournal(f"life {self._lives}", remembered=self._sizes[0], page=self._sizes[1])

    def change(self, names: list[str]) -> None:
        for name in names:
            head = self.heads.get(name, LogHead(0, 0, 0))
            self.heads[name] = LogHead(1, 0, head.next + 1)
        self._journal.record_changes(dict.fromkeys(names))

    def answer(self, prefix: str, since: str) -> Changes:
        return self._journal.changes_since(Changed(prefix, since), self._listed, self.heads.__getitem__)

    def _listed(self, prefix: str, after: str, limit: int) -> list[tuple[str, LogHead]]:
        found = sorted((name, head) for name, head in self.heads.items() if name.startswith(prefix) and name > after)
        return found[:limit]


@given(
    st.lists(st.one_of(st.lists(NAMES, min_size=1, max_size=4), st.just("ask"), st.just("restart")), max_size=60),
    st.integers(1, 6),
    st.integers(1, 3),
)
def test_who_goes_on_from_token_to_token_comes_to_know_every_head(
    steps: list[list[str] | str], remembered: int, page: int
) -> None:
    """One answer per step. Between the pages of a series, other writers change logs that were already reported and logs
    that were not.
    """
    engine, known, token = Engine(remembered, page), dict[str, LogHead](), ""
    for step in steps:
        if step == "restart":
            engine.restart()
        elif step == "ask":
            found = engine.answer("a/", token)
            known.update(found.heads)
            token = found.token
            assert len(found.heads) <= page and all(name.startswith("a/") for name, _ in found.heads)
        else:
            engine.change(list(step))
    more = True
    while more:
        found = engine.answer("a/", token)
        known.update(found.heads)
        token, more = found.token, found.more
    assert known == {name: head for name, head in engine.heads.items() if name.startswith("a/")}
    assert engine.answer("a/", token) == Changes((), token, False)


async def test_a_log_is_due_until_it_is_done_and_again_with_its_next_change() -> None:
    consensus = MemoryConsensus(SystemClock())
    logs = ChangedLogs(consensus, "p/")
    await consensus.append("p/a", 1, 0, [b"x"], "n")
    await consensus.append("p/b", 1, 0, [b"x"], "n")
    await consensus.append("q/a", 1, 0, [b"x"], "n")
    everything = {"a": LogHead(1, 0, 1), "b": LogHead(1, 0, 1)}
    for _ in range(3):
        assert await logs.next_changed(everything.__contains__) == everything
    logs.done(["a"])
    assert await logs.next_changed(everything.__contains__) == {"b": LogHead(1, 0, 1)}
    await consensus.append("p/a", 1, 1, [b"x"], "n")
    assert (await logs.next_changed(everything.__contains__))["a"] == LogHead(1, 0, 2)


async def test_a_log_that_is_known_at_no_second_look_is_let_go() -> None:
    consensus = MemoryConsensus(SystemClock())
    logs = ChangedLogs(consensus, "p/")
    await consensus.append("p/late", 1, 0, [b"x"], "n")
    await consensus.append("p/gone", 1, 0, [b"x"], "n")
    assert await logs.next_changed(lambda _: False) == {}
    assert await logs.next_changed(lambda name: name == "late") == {"late": LogHead(1, 0, 1)}
    assert await logs.next_changed(lambda _: True) == {"late": LogHead(1, 0, 1)}, "it was let go, and has not changed"
