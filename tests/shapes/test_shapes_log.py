"""Offsets and the log: order, chunks, whole transactions, limits (row H1, ST5)."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.base.clock import ManualClock, Rand
from tidemill.base.errors import InvalidError
from tidemill.shapes.definition.definition import HandleMint, ShapeDefinition, Source
from tidemill.shapes.log.chunks import split_chunk
from tidemill.shapes.log.items import KeyWriter, LogItem, mark_last, render_item, up_to_date_item
from tidemill.shapes.log.log import LogLimits, ShapeLog
from tidemill.shapes.log.log_offset import BASE_END, BEFORE_ALL, FIRST_OP, LogOffset
from tidemill.shapes.log.log_offset import parse_number as read_number
from tidemill.shapes.memory_budget import Budget


def item(tx: int, op: int, size: int = 10) -> LogItem:
    return LogItem(LogOffset(tx, op), b"x" * size)


def append(log: ShapeLog, items: list[LogItem]) -> None:
    for each in items:
        log.stage(each)
    log.publish()


def read_all(log: ShapeLog, offset: LogOffset = BEFORE_ALL) -> list[bytes]:
    out: list[bytes] = []
    while True:
        chunk = log.read(offset)
        out.extend(split_chunk(chunk.items))
        if chunk.complete:
            return out
        assert chunk.end > offset
        offset = chunk.end


@pytest.mark.parametrize("text", ["-1", "0_0", "0_inf", "26800584_4", "0_17"])
def test_offsets_are_written_as_they_are_read(text: str) -> None:
    assert str(LogOffset.parse(text)) == text


@pytest.mark.parametrize("text", ["", "1", "_", "1_", "_1", "-2", "-1_0", "1_-1", "a_b", "1_2_3", "0_INF", "²_1"])
def test_malformed_offsets_are_refused(text: str) -> None:
    with pytest.raises(InvalidError):
        LogOffset.parse(text)


def test_numbers_that_python_refuses_to_read_are_refused_as_any_other() -> None:
    for text in ("9" * 5_000 + "_0", "0_" + "1" * 5_000):
        with pytest.raises(InvalidError):
            LogOffset.parse(text)
    assert read_number("1" * 5_000) is None and read_number("17") == 17


def test_the_base_sorts_before_every_transaction() -> None:
    texts = ["-1", "0_0", "0_1", "0_inf", "16000_0", "16000_2", "16008_0"]
    offsets = [LogOffset.parse(text) for text in texts]
    assert offsets == sorted(offsets)


def test_an_empty_base_is_one_chunk_that_ends_at_its_end() -> None:
    log = ShapeLog()
    log.seal_base()
    first = log.read(BEFORE_ALL)
    assert (list(first.items), first.end, first.complete) == ([], LogOffset(0, 0), False)
    then = log.read(first.end)
    assert (list(then.items), then.end, then.complete) == ([], BASE_END, True)


def test_st5_chunks_close_by_json_bytes_and_chain_without_gaps() -> None:
    log = ShapeLog(LogLimits(chunk_bytes=25))
    log.add_base([b"%010d" % n for n in range(10)])
    log.seal_base()
    ends, offset = [], BEFORE_ALL
    rows: list[bytes] = []
    while offset != BASE_END:
        chunk = log.read(offset)
        offset = chunk.end
        ends.append(str(offset))
        rows.extend(split_chunk(chunk.items))
    assert ends == ["0_0", "0_1", "0_2", "0_3", "0_inf"]
    assert rows == [b"%010d" % n for n in range(10)]


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), max_size=12),
    st.lists(st.integers(1, 30), max_size=10),
    st.integers(1, 60),
)
def test_a_reader_gets_every_item_once_and_in_order_whatever_the_chunk_size(
    transactions: list[list[int]], base: list[int], chunk_bytes: int
) -> None:
    log = ShapeLog(LogLimits(chunk_bytes=chunk_bytes))
    log.add_base([b"b" * size for size in base])
    log.seal_base()
    expected = [b"b" * size for size in base]
    for number, sizes in enumerate(transactions):
        items = [item(1000 + number, FIRST_OP + 2 * op, size) for op, size in enumerate(sizes)]
        append(log, items)
        expected += [i.json for i in items]
    assert read_all(log) == expected
    for number, sizes in enumerate(transactions):
        for op in range(len(sizes)):
            rest = read_all(log, LogOffset(1000 + number, FIRST_OP + 2 * op))
            before = sum(len(s) for s in transactions[:number]) + op + 1
            assert rest == expected[len(base) + before :]
        behind = sum(len(s) for s in transactions[: number + 1])
        assert read_all(log, LogOffset(1000 + number, 0)) == expected[len(base) + behind :], "the whole transaction"


def test_l1_an_item_that_does_not_come_after_the_end_is_refused_and_nothing_is_added() -> None:
    log = ShapeLog()
    log.seal_base()
    append(log, [item(10, 0)])
    with pytest.raises(RuntimeError, match="must grow"):
        append(log, [item(11, 0), item(10, 4)])
    log.unstage()
    assert log.end == LogOffset(10, 0)
    assert len(read_all(log)) == 1


def test_l2_staged_items_are_seen_by_nobody_until_they_are_published_and_can_be_taken_back() -> None:
    budget = Budget(10_000)
    log = ShapeLog(budget=budget)
    log.seal_base()
    append(log, [item(10, 0)])
    before = (budget.used_bytes, log.log_bytes, log.end)
    for op in range(5):
        log.stage(item(20, op))
    assert (log.end, len(read_all(log)), log.read(LogOffset(10, 0)).complete) == (LogOffset(10, 0), 1, True)
    log.unstage()
    assert (budget.used_bytes, log.log_bytes, log.end) == before
    log.stage(item(20, 0))
    assert log.publish() and not log.publish()
    assert log.end == LogOffset(20, 0)
    log.stage(item(30, 0))
    log.drop()
    assert budget.used_bytes == 0
    log.stage(item(40, 0))
    assert budget.used_bytes == 0


def test_a_base_larger_than_its_limit_is_refused_with_what_to_do() -> None:
    log = ShapeLog(LogLimits(base_bytes=100))
    with pytest.raises(InvalidError, match="Narrow it"):
        log.add_base([b"x" * 60, b"y" * 60])


def test_keys_are_quoted_doubled_and_ordered_as_the_protocol_says() -> None:
    row = {"a": "x/y", "b": None, "c": ""}
    assert KeyWriter("public", "t", ["a"]).key(row) == '"public"."t"/"x//y"'
    assert KeyWriter("public", "t", ["b", "a"]).key(row) == '"public"."t"/_/"x//y"'
    assert KeyWriter("s.1", "t/2", ["c"]).key(row) == '"s..1"."t//2"/""'
    assert KeyWriter("p", "t", []).key({"b": "2", "a": "1"}) == '"p"."t"/"1"/"2"'


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_different_keys_are_written_differently(one: tuple[str, str], other: tuple[str, str]) -> None:
    """Quotes are not escaped (nor are they in Electric), so two-column keys may only collide through `"/"`."""
    writer = KeyWriter("s", "t", ["a", "b"])
    first, second = (writer.key({"a": a, "b": b}) for a, b in (one, other))
    if '"' not in "".join(one + other):
        assert (first == second) == (one == other)


def test_marking_the_last_item_adds_one_header_and_changes_nothing_else() -> None:
    plain = render_item("k", {"a": "}}"}, {"operation": "update"}, {"a": "b"})
    marked = orjson.loads(mark_last(plain))
    assert marked.pop("headers") == {"operation": "update", "last": True}
    original = orjson.loads(plain)
    del original["headers"]
    assert marked == original


def test_the_up_to_date_item_carries_a_decimal_position() -> None:
    control = orjson.loads(up_to_date_item(26800584))
    assert control == {"headers": {"control": "up-to-date", "global_last_seen_lsn": "26800584"}}


def test_handles_differ_even_when_the_clock_stands_still() -> None:
    mint = HandleMint(ManualClock(), Rand(1))
    definition = ShapeDefinition(Source("table", "main", "public", "t"))
    handles = [mint.mint(definition) for _ in range(200)]
    assert len(set(handles)) == 200
    assert len({handle.split("-")[0] for handle in handles}) == 1


def test_equal_definitions_have_one_digest_and_others_another() -> None:
    one = ShapeDefinition(Source("table", "main", "public", "t"), where="id = 1")
    assert one.digest() == ShapeDefinition(Source("table", "main", "public", "t"), where="id = 1").digest()
    assert one.digest() != ShapeDefinition(Source("table", "main", "public", "t"), where="id = 2").digest()
