"""CV1-CV4, decoding, and everything else that turns messages into fragments."""

from __future__ import annotations

import contextlib
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from support.capture.fragments import OTHER, T, at
from tidemill.base.errors import CorruptError, InvalidError
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Fragment, Marker
from tidemill.capture.decode.row_tuples import build_change
from tidemill.capture.decode.transaction_builder import (
    MARKER_BYTES,
    MARKERS_PER_TXN,
    RelationSeen,
    TransactionBuilder,
    is_key_changed,
    merge_relation,
)
from tidemill.capture.postgres.pgoutput import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    RelationMessage,
    Truncate,
    Update,
    WireColumn,
    decode_message,
)

BEGIN, COMMIT = Begin(100, 1000, 7), Commit(100, 140, 1000)


def converter(**settings: int) -> TransactionBuilder:
    return TransactionBuilder({T.oid: T, OTHER.oid: OTHER}, **settings)


def run(c: TransactionBuilder, *messages: Message) -> list[Fragment]:
    return [out for m in messages if isinstance(out := c.feed_message(m, 10), Fragment)]


def insert(n: int) -> Insert:
    return Insert(T.oid, [str(n), "x"])


@given(st.integers(2, 6), st.integers(0, 30))
def test_cv1_fragments_cover_the_transaction_and_the_commit_has_a_position_of_its_own(limit: int, count: int) -> None:
    out = run(converter(max_changes=limit), BEGIN, *[insert(n) for n in range(count)], COMMIT)
    assert [c.new["id"] for f in out for c in f.changes if c.new] == [str(n) for n in range(count)]
    lasts = [f.last for f in out]
    assert lasts == sorted(set(lasts))
    assert [f.begins for f in out] == [True] + [False] * (len(out) - 1)
    assert [f.commits for f in out] == [False] * (len(out) - 1) + [True]
    if count:
        assert out[-1].changes
    assert all(len(f.changes) <= limit for f in out)


MESSAGES = st.lists(
    st.one_of(
        st.builds(insert, st.integers(0, 9)),
        st.builds(lambda n: Update(T.oid, "O", [str(n), "x"], [str(n + 1), "y"]), st.integers(0, 9)),
        st.builds(lambda n: Delete(T.oid, "O", [str(n), "x"]), st.integers(0, 9)),
        st.sampled_from([Truncate((T.oid,), False, False), Truncate((T.oid, OTHER.oid), False, False)]),
        st.just(LogicalMessage(True, 1, "tidemill", b"tag")),
    ),
    max_size=25,
)


@given(st.lists(MESSAGES, max_size=4), st.integers(2, 7), st.integers(1, 60), st.integers(0, 30), st.randoms())
def test_p3_every_fragment_has_a_last_position_of_its_own_whatever_the_sizes(
    transactions: list[list[Message]], max_changes: int, max_bytes: int, largest: int, rng: random.Random
) -> None:
    """Any messages, limits by count and by bytes, and sizes of rows, including exact multiples, truncates of several
    tables and empty transactions. Every change appears exactly once, and the committing fragment comes last.
    """
    c = converter(max_changes=max_changes, max_bytes=max_bytes)
    out: list[Fragment] = []
    for number, messages in enumerate(transactions, 1):
        for message in (Begin(100 * number, 0, number), *messages, Commit(100 * number, 100 * number + 40, 0)):
            found = c.feed_message(message, rng.randint(0, largest))
            out += [found] if isinstance(found, Fragment) else []
    lasts = [f.last for f in out]
    assert lasts == sorted(set(lasts))
    assert [f.commit_lsn for f in out if f.commits] == [100 * n for n in range(1, len(transactions) + 1)]
    for number, messages in enumerate(transactions, 1):
        mine = [f for f in out if f.commit_lsn == 100 * number]
        changes = [change for f in mine for change in f.changes]
        rows = (Insert, Update, Delete)
        expected = sum(len(m.oids) if isinstance(m, Truncate) else isinstance(m, rows) for m in messages)
        assert [change.position.ordinal for change in changes] == [2 * n for n in range(expected)]
        assert [f.begins for f in mine] == [True] + [False] * (len(mine) - 1)
        assert [f.commits for f in mine] == [False] * (len(mine) - 1) + [True]
        assert all(f.changes and f.last == f.changes[-1].position for f in mine if not f.commits or changes)


def test_a_commit_that_goes_back_is_no_replay_within_one_stream() -> None:
    """The collector would drop it silently."""
    c = converter()
    assert len(run(c, BEGIN, insert(1), COMMIT)) == 1
    with pytest.raises(CorruptError, match="go back"):
        c.feed_message(Begin(100, 1000, 8))


def test_the_change_held_back_counts_with_its_bytes() -> None:
    c = converter(max_changes=100, max_bytes=100)
    c.feed_message(BEGIN)
    assert c.feed_message(insert(1), 90) is None
    first = c.feed_message(insert(2), 90)
    second = c.feed_message(insert(3), 90)
    assert isinstance(first, Fragment) and isinstance(second, Fragment)
    assert [len(f.changes) for f in (first, second)] == [1, 1]


def test_markers_are_few_and_short_whoever_writes_them() -> None:
    c = converter()
    c.feed_message(BEGIN)
    for n in range(MARKERS_PER_TXN + 5):
        c.feed_message(LogicalMessage(True, 1, "tidemill", b"%d" % n))
    c.feed_message(LogicalMessage(True, 1, "tidemill", b"x" * (MARKER_BYTES + 1)))
    out = c.feed_message(COMMIT)
    assert isinstance(out, Fragment)
    assert len(out.markers) == MARKERS_PER_TXN and c.markers_left_out == 6


def test_cv1_exact_multiples_keep_the_newest_change_for_the_commit() -> None:
    """electric #3726"""
    out = run(converter(max_changes=2), BEGIN, *[insert(n) for n in range(4)], COMMIT)
    assert [len(f.changes) for f in out] == [2, 2]
    assert out[-1].last > out[0].last


def test_cv2_a_relation_in_the_middle_of_a_batch_is_told_first_and_the_batch_stays() -> None:
    c = converter()
    assert run(c, BEGIN, insert(1)) == []
    seen = c.feed_message(RelationMessage(T.oid, "public", "t", "f", (WireColumn("id", 23, -1, True),)))
    assert isinstance(seen, RelationSeen) and seen.changed
    (out,) = run(c, insert(2), COMMIT)
    assert len(out.changes) == 2


def test_cv2_a_relation_as_known_is_not_a_change() -> None:
    columns = (WireColumn("id", 23, -1, True), WireColumn("v", 25, -1, True))
    seen = converter().feed_message(RelationMessage(T.oid, "public", "t", "f", columns))
    assert isinstance(seen, RelationSeen) and not seen.changed


def test_cv3_an_empty_transaction_is_one_fragment_at_the_commit() -> None:
    (out,) = run(converter(), BEGIN, COMMIT)
    assert (out.begins, out.commits, out.changes, out.last) == (True, True, (), at(100, 0))


def test_cv4_a_truncate_of_n_tables_is_n_changes_two_ordinals_apart() -> None:
    (out,) = run(converter(), BEGIN, Truncate((1, 2), False, False), COMMIT)
    assert [(c.relation.table, c.op, c.position.ordinal) for c in out.changes] == [
        ("t", "truncate", 0),
        ("other", "truncate", 2),
    ]


def test_unchanged_toast_is_filled_from_the_old_row() -> None:
    (out,) = run(converter(), BEGIN, Update(1, "O", ["1", "long"], ["1", UNCHANGED]), COMMIT)
    assert out.changes[0].new == {"id": "1", "v": "long"}


def test_a_key_change_is_one_change_with_the_old_row() -> None:
    (out,) = run(converter(), BEGIN, Update(1, "O", ["1", "a"], ["2", "a"]), insert(3), COMMIT)
    assert is_key_changed(out.changes[0])
    assert [c.position.ordinal for c in out.changes] == [0, 2]


def test_rc8_an_update_or_delete_without_the_old_row_says_what_to_do() -> None:
    for message in (Update(1, "", None, ["1", "a"]), Delete(1, "K", ["1", None])):
        with pytest.raises(InvalidError, match="REPLICA IDENTITY FULL"):
            run(converter(), BEGIN, message)


def test_markers_ride_on_the_fragment_that_commits() -> None:
    def message(prefix: str, content: bytes, transactional: bool = True) -> LogicalMessage:
        return LogicalMessage(transactional, 1, prefix, content)

    c = converter(max_changes=2)
    out = run(
        c, BEGIN, message("tidemill", b"here"), message("else", b"no"), message("tidemill", b""),
        message("tidemill", b"no", False), insert(1), insert(2), insert(3), COMMIT,
    )  # fmt: skip
    assert [f.markers for f in out] == [(), (Marker("here"),)]
    assert run(c, Begin(200, 0, 8), Commit(200, 240, 0))[0].markers == ()


def test_a_broken_grammar_is_corrupt() -> None:
    for messages in ([insert(1)], [BEGIN, BEGIN], [COMMIT], [BEGIN, Insert(99, ["1"])], [BEGIN, Insert(1, ["1"])]):
        with pytest.raises(CorruptError):
            run(converter(), *messages)


def test_columns_follow_the_stream_and_keys_the_catalogue() -> None:
    message = RelationMessage(
        1,
        "public",
        "t",
        "f",
        (WireColumn("v", 25, -1, True), WireColumn("id", 23, -1, True), WireColumn("n", 20, -1, True)),
    )
    merged = merge_relation(message, T)
    assert [(c.name, c.key_index) for c in merged.columns] == [("v", -1), ("id", 0), ("n", -1)]
    assert [c.name for c in merge_relation(message, None).key_columns] == ["v", "id", "n"]  # SLC11


def _cstring(text: str) -> bytes:
    return text.encode() + b"\0"


def _encoded_tuple(values: list[str | None]) -> bytes:
    parts = [struct.pack(">H", len(values))]
    for value in values:
        parts.append(b"n" if value is None else b"t" + struct.pack(">I", len(value.encode())) + value.encode())
    return b"".join(parts)


TEXTS = st.lists(st.none() | st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")), max_size=6)


@given(TEXTS, TEXTS)
def test_tuples_are_decoded_as_they_were_encoded(old: list[str | None], new: list[str | None]) -> None:
    data = b"U" + struct.pack(">I", 7) + b"O" + _encoded_tuple(old) + b"N" + _encoded_tuple(new)
    assert decode_message(data) == Update(7, "O", old, new)  # type: ignore[arg-type]
    assert decode_message(b"I" + struct.pack(">I", 7) + b"N" + _encoded_tuple(new)) == Insert(7, new)  # type: ignore[arg-type]


def test_an_unchanged_value_and_an_empty_schema_are_decoded() -> None:
    data = b"U" + struct.pack(">I", 7) + b"N" + struct.pack(">H", 1) + b"u"
    assert decode_message(data) == Update(7, "", None, [UNCHANGED])
    relation = b"R" + struct.pack(">I", 7) + _cstring("") + _cstring("pg") + b"f" + struct.pack(">H", 0)
    assert decode_message(relation) == RelationMessage(7, "pg_catalog", "pg", "f", ())


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_a_message_or_corrupt(data: bytes) -> None:
    with contextlib.suppress(CorruptError):
        decode_message(data)


def test_a_relation_parked_now_or_in_an_earlier_life_leaves_the_others_where_they_are() -> None:
    """Changes of the other relation keep their ordinals: a replay after a restart must meet the same positions in the
    topics' tails.
    """
    other = Insert(OTHER.oid, ["1"] * len(OTHER.columns))
    messages = [insert(1), other, insert(2), Truncate((T.oid, OTHER.oid), False, False), other, insert(3), other]
    plain = run(converter(), BEGIN, *messages, COMMIT)
    wanted = [(c.op, c.position) for f in plain for c in f.changes if c.relation is OTHER]

    earlier = converter()
    earlier.pause_relation(T.oid, 100)
    now = converter()
    first = run(now, BEGIN, *messages[:2])
    now.pause_relation(T.oid, 100)
    later = first + run(now, *messages[2:], COMMIT)
    for fragments in (run(earlier, BEGIN, *messages, COMMIT), later):
        assert [(c.op, c.position) for f in fragments for c in f.changes if c.relation is OTHER] == wanted
        mine = [c for f in fragments for c in f.changes if c.relation is T]
        assert mine[-1].op == "truncate" and mine[-1].position > wanted[-1][1], "its followers are told at the end"
    assert [c.op for f in later for c in f.changes if c.relation is T] == ["insert", "truncate"]


def test_a_relation_is_parked_from_its_lsn_on_and_told_there() -> None:
    c = converter()
    c.pause_relation(T.oid, 150)
    (before,) = run(c, BEGIN, insert(1), COMMIT)
    (after,) = run(c, Begin(200, 1000, 8), insert(2), Commit(200, 240, 1000))
    assert [change.op for change in before.changes] == ["insert"]
    assert [change.op for change in after.changes] == ["truncate"]


def test_an_old_row_with_null_where_a_value_did_not_change_is_not_whole() -> None:
    """A partition without FULL below a root that has it sends such rows. An unchanged TOAST value is never NULL, so the
    NULL shows that the old row lacks it.
    """
    update = Update(1, "O", ["1", None], ["2", UNCHANGED])
    with pytest.raises(InvalidError, match="REPLICA IDENTITY FULL"):
        build_change(T, ("id", "v"), update, ChangePosition(1, 0))
    found = build_change(replace(T, old_rows="key"), ("id", "v"), update, ChangePosition(1, 0))
    assert (found.new, found.unchanged) == ({"id": "2"}, ("v",))
