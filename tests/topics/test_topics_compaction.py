"""Compaction by key: the surviving records are those of a dictionary model, and other fields of a batch are
unchanged."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.topics.api import BatchRef, InvalidRecordsError, Marker
from tidemill.topics.batch import Record, decode_batch, encode_batch, parse_header
from tidemill.topics.batch.control_batch import as_transactional, encode_marker
from tidemill.topics.batch.records import columns_from_fields
from tidemill.topics.batch.validation import check_body
from tidemill.topics.compaction.clean import PassRules, StoredBatch, collect_keys, compact_batches
from tidemill.topics.compaction.keymap import LONG_BYTES, KeyHash, KeyMap
from tidemill.topics.fetch.timestamp_lookup import first_offset_at

HASH = KeyHash(b"secret")
keys = st.none() | st.sampled_from([b"", b"a", b"b", b"\0", b"\0\0", b"longer key", b"k" * 300, b"k" * 301])
values = st.none() | st.sampled_from([b"", b"v", b"x" * 200])
records = st.builds(
    Record,
    key=keys,
    value=values,
    headers=st.sampled_from([(), (("h", b"1"),), (("h", None), ("i", b""))]),
    timestamp_ms=st.integers(1_000, 2_000),
)
batches = st.lists(
    st.tuples(
        st.lists(records, min_size=1, max_size=12),
        st.sampled_from(["none", "gzip", "snappy", "lz4", "zstd"]),
        st.sampled_from(["plain", "committed", "aborted"]),
    ),
    min_size=1,
    max_size=8,
)


def stored(groups: list[tuple[list[Record], str, str]]) -> tuple[list[StoredBatch], dict[int, Record]]:
    """Return the batches, with a marker after each of a transaction, and the visible records."""
    base, out, seen = 100, list[StoredBatch](), dict[int, Record]()
    for rows, codec, kind in groups:
        data = encode_batch(rows, base_offset=base, compression=codec, producer_id=7, producer_epoch=3, base_sequence=5)
        aborted: tuple[int, ...] = (7,) if kind == "aborted" else ()
        if kind != "plain":
            data = as_transactional(data)
        out.append((BatchRef("o", 0, len(data), base, len(rows), parse_header(data).max_timestamp_ms, aborted), data))
        if kind != "aborted":
            seen |= {base + i: row for i, row in enumerate(rows)}
        base += len(rows)
        if kind != "plain":
            marker = bytearray(encode_marker(Marker(7, 3, commit=kind == "committed", coordinator_epoch=1), 1_500))
            marker[:8] = base.to_bytes(8, "big")
            out.append((BatchRef("o", 0, len(marker), base, 1, 1_500, aborted), bytes(marker)))
            base += 1
    return out, seen


def rules(known: list[StoredBatch], end: int, tombstones_below: int = 0, *, captured: bool = False) -> PassRules:
    found = KeyMap(1 << 20)
    collect_keys([each for each in known if each[0].base_offset < end], HASH, found, captured=captured)
    return PassRules(found, HASH, end, tombstones_below, 0, captured)


def visible(cleaned: list[tuple[bytes, tuple[int, ...]]]) -> dict[int, tuple[object, ...]]:
    found: dict[int, tuple[object, ...]] = {}
    for data, aborted in cleaned:
        header, decoded = (batch := decode_batch(data)).header, batch.records
        if header.attributes & 0x20 or aborted:
            continue
        found |= {r.offset: (r.key, r.value, r.headers, r.timestamp_ms) for r in decoded}
    return found


@given(batches, st.integers(0, 9), st.integers(100, 200), st.booleans())
@settings(max_examples=150, deadline=None)
def test_what_stays_is_the_newest_record_of_each_key(
    groups: list[tuple[list[Record], str, str]], cut: int, tombstones_below: int, captured: bool
) -> None:
    """A record without a key in a captured table's topic replaces all records before it."""
    known, seen = stored(groups)
    ends = [*(ref.base_offset for ref, _ in known), known[-1][0].base_offset + known[-1][0].record_count]
    end = ends[min(cut, len(ends) - 1)]
    tombstones_below = min(tombstones_below, end)
    newest = {row.key: offset for offset, row in seen.items() if offset < end}
    emptied = newest.get(None, -1) if captured else -1

    def deletes(row: tuple[object, ...]) -> bool:
        return row[1] is None or (captured and row[0] is None)

    expected = {
        offset: row
        for offset, row in ((at, (r.key, r.value, r.headers, r.timestamp_ms)) for at, r in seen.items())
        if offset >= end
        or (
            (row[0] is not None or captured)
            and newest[row[0]] == offset >= emptied
            and not (deletes(row) and offset < tombstones_below)
        )
    }
    done = compact_batches(known, rules(known, end, tombstones_below, captured=captured))
    aborted = {ref.base_offset: ref.aborted for ref, _ in known}
    assert visible([(bytes(b.data), aborted[b.base_offset]) for b in done.batches]) == expected
    assert done.tombstones == sum(offset < end and deletes(row) for offset, row in expected.items())
    before = {ref.base_offset: data for ref, data in known}
    for batch in done.batches:
        old, new = parse_header(before[batch.base_offset]), parse_header(batch.data)
        assert check_crc(bytes(batch.data)) and len(batch.data) == new.size_bytes
        for name in (
            "base_offset",
            "last_offset_delta",
            "attributes",
            "producer_id",
            "producer_epoch",
            "base_sequence",
        ):
            assert getattr(old, name) == getattr(new, name)
        assert (batch.next_offset, batch.max_timestamp_ms) == (new.next_offset, new.max_timestamp_ms)
    again = [
        (
            BatchRef("o", 0, len(b.data), at := b.base_offset, b.next_offset - at, b.max_timestamp_ms, aborted[at]),
            b.data,
        )
        for b in done.batches
    ]
    twice = compact_batches(again, rules(again, end, tombstones_below, captured=captured))
    assert not twice.changed and [bytes(b.data) for b in twice.batches] == [bytes(b.data) for b in done.batches]
    assert done.changed == ([bytes(b.data) for b in done.batches] != [bytes(data) for _, data in known])


def check_crc(data: bytes) -> bool:
    decode_batch(data)  # raises where it is wrong
    return True


def test_what_cannot_be_read_stays_as_it_is_and_its_neighbours_are_cleaned() -> None:
    known, _ = stored([([Record(b"a", b"1", (), 1000)], "none", "plain")] * 3)
    broken = bytearray(known[1][1])
    broken[-2] ^= 1
    known[1] = known[1][0], bytes(broken)
    done = compact_batches(known, rules(known, 103))
    assert [(b.base_offset, bytes(b.data)) for b in done.batches] == [(101, bytes(broken)), (102, known[2][1])]


def test_a_marker_of_a_commit_goes_and_one_of_an_abort_stays() -> None:
    known, _ = stored([([Record(b"a", b"1", (), 1000)], "none", kind) for kind in ("committed", "aborted", "plain")])
    assert [b.base_offset for b in compact_batches(known, rules(known, 105)).batches] == [103, 104]


def test_a_marker_of_an_abort_goes_when_no_fetch_names_any_more_what_it_ended() -> None:
    known, _ = stored([([Record(b"a", b"1", (), 1000)], "none", kind) for kind in ("aborted", "aborted", "plain")])
    known = [(msgspec.structs.replace(ref, aborted=()), data) for ref, data in known[1::2] + known[4:]]
    for below, kept in ((101, [101, 103, 104]), (103, [103, 104]), (200, [104])):
        done = compact_batches(known, msgspec.structs.replace(rules(known, 105), markers_below=below))
        assert [b.base_offset for b in done.batches] == kept and done.changed == (len(kept) < 3)
    done = compact_batches(known, msgspec.structs.replace(rules(known, 103), markers_below=200))
    assert [b.base_offset for b in done.batches] == [103, 104], "what the pass does not reach stays"


def test_the_hash_of_a_key_depends_on_it_alone() -> None:
    source = np.random.default_rng(3)
    some = [source.bytes(int(n)) for n in source.integers(0, LONG_BYTES + 40, 3_000)]
    some += [b"\0" * n for n in range(LONG_BYTES + 40)]
    columns = columns_from_fields(some, [None] * len(some))
    found = HASH.hash_keys(columns.body, columns.key_at, columns.key_bytes)
    backwards = columns_from_fields(some[::-1], [None] * len(some))
    again = HASH.hash_keys(backwards.body, backwards.key_at, backwards.key_bytes)[::-1]
    assert (found == again).all()
    assert len({tuple(row) for row in found.tolist()}) == len(set(some))
    assert (KeyHash(b"another").hash_keys(columns.body, columns.key_at, columns.key_bytes) != found).any(axis=1).all()


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=40), max_size=12), st.integers(1, 30)
)
@settings(max_examples=80, deadline=None)
def test_the_map_is_a_dictionary_also_where_halves_of_hashes_meet(
    calls: list[list[tuple[int, int]]], room: int
) -> None:
    known, model, offset = KeyMap(room), dict[tuple[int, int], int](), 0
    for call in calls:
        known.add(np.array(call, np.uint64).reshape(-1, 2), np.arange(offset, offset + len(call)))
        model |= {key: offset + i for i, key in enumerate(call)}
        offset += len(call)
        assert len(known) == len(model) and known.is_full == (len(model) >= room)
    every = [(a, b) for a in range(10) for b in range(4)]
    for at in (-1, offset // 2, offset):
        found = known.is_superseded(np.array(every, np.uint64), np.full(len(every), at))
        assert found.tolist() == [model.get(key, -1) > at for key in every]


def test_a_time_is_found_in_a_batch_with_gaps() -> None:
    rows = [Record(b"%d" % (i % 4), b"v", (), 1_000 + i) for i in range(10)]
    known, _ = stored([(rows, "lz4", "plain")])
    done = compact_batches(known, rules(known, 110))
    ref = BatchRef("o", 0, 0, 100, 10, 1_009)
    assert [r.offset for r in decode_batch(done.batches[0].data).records] == [106, 107, 108, 109]
    assert first_offset_at(done.batches[0].data, ref, 0) == (106, 1_006)
    assert first_offset_at(done.batches[0].data, ref, 1_008) == (108, 1_008)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_record_without_a_key_is_named_where_keys_are_asked_for(codec: str) -> None:
    rows = [Record(b"k" if i % 3 else None, None, (), 1_000) for i in range(7)]
    data = encode_batch(rows, compression=codec)
    assert check_body(parse_header(data), data) == 1_000
    with pytest.raises(InvalidRecordsError) as refused:
        check_body(parse_header(data), data, keyed=True)
    assert [index for index, _ in refused.value.record_errors] == [0, 3, 6]
    good = encode_batch([Record(b"", None, (), 1_000)] * 300, compression=codec)
    assert check_body(parse_header(good), good, keyed=True) == 1_000
