"""Layers of rows in memory: guarantees of pins, a stack of bounded depth, and keys sorted in slices."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.metastore.lsm.flush import frozen_rows
from tidemill.metastore.lsm.memtable import FOLD_ROWS, ROW_OVERHEAD_BYTES, SORT_ROWS, Layer, Memtable

Rows = dict[bytes, tuple[bytes, int]]


def put(memtable: Memtable, seqno: int, rows: dict[bytes, bytes]) -> bool:
    data_bytes = sum(len(key) + len(value) for key, value in rows.items())
    return memtable.put(seqno, list(rows), list(rows.values()), data_bytes)


def seen(layers: tuple[Layer, ...]) -> Rows:
    """Return the rows that a reader of these layers finds."""
    rows: Rows = {}
    for layer in reversed(layers):
        rows.update({key: (value, layer.seqnos[key]) for key, value in layer.values.items()})
    return rows


def sort(layer: Layer) -> list[bytes]:
    while not layer.sort_step():
        pass
    assert layer.sorted_keys is not None
    return layer.sorted_keys


def test_a_pinned_layer_stands_still_and_the_next_batch_opens_a_new_one() -> None:
    memtable = Memtable()
    assert put(memtable, 1, {b"a": b"1"})
    before = memtable.layers
    before[0].pins += 1
    assert put(memtable, 2, {b"a": b"2", b"b": b"2"})
    assert seen(before) == {b"a": (b"1", 1)}
    assert seen(memtable.layers) == {b"a": (b"2", 2), b"b": (b"2", 2)}


def test_a_layer_unpinned_before_the_next_batch_is_written_again() -> None:
    memtable = Memtable()
    put(memtable, 1, {b"a": b"1"})
    memtable.layers[0].pins += 1
    memtable.layers[0].pins -= 1
    assert not put(memtable, 2, {b"b": b"2"})
    assert len(memtable.layers) == 1


def test_every_batch_under_a_pin_of_its_own_still_leaves_a_shallow_stack() -> None:
    memtable = Memtable()
    kept = []
    for seqno in range(1, 600):
        put(memtable, seqno, {b"k%d" % seqno: b"v", b"same": b"%d" % seqno})
        memtable.layers[0].pins += 1
        kept.append(memtable.layers)
        assert len(memtable.layers) <= 2 + memtable.rows.bit_length()
    for seqno, layers in enumerate(kept, start=1):  # a pinned reader sees the same rows after later folds
        rows = seen(layers)
        assert rows[b"same"] == (b"%d" % seqno, seqno) and len(rows) == seqno + 1


def test_large_layers_are_not_folded() -> None:
    memtable = Memtable()
    half = FOLD_ROWS // 2 + 1
    for turn in range(3):
        put(memtable, turn + 1, {b"%d/%d" % (turn, number): b"" for number in range(half)})
        memtable.layers[0].pins += 1
    put(memtable, 9, {b"x": b"y"})
    assert [len(layer.values) for layer in memtable.layers] == [1, half, half, half]


def test_frozen_rows_stay_readable_until_dropped_and_are_not_written() -> None:
    memtable = Memtable()
    put(memtable, 1, {b"a": b"1"})
    frozen = memtable.freeze()
    put(memtable, 2, {b"a": b"2"})
    assert seen(frozen) == {b"a": (b"1", 1)}
    assert memtable.live_bytes == 2 + ROW_OVERHEAD_BYTES and memtable.size_bytes == 2 * memtable.live_bytes
    memtable.drop_frozen()
    assert seen(memtable.layers) == {b"a": (b"2", 2)}
    assert memtable.live_bytes == memtable.size_bytes == 2 + ROW_OVERHEAD_BYTES


def test_a_thawed_stack_is_frozen_again_with_what_came_after_it() -> None:
    memtable = Memtable()
    put(memtable, 1, {b"a": b"1", b"b": b"1"})
    memtable.freeze()
    put(memtable, 2, {b"a": b"2"})
    memtable.thaw()
    assert memtable.live_bytes == memtable.size_bytes
    assert seen(memtable.freeze()) == {b"a": (b"2", 2), b"b": (b"1", 1)}


def test_nothing_to_freeze_is_no_layer() -> None:
    assert Memtable().freeze() == ()


def test_dropping_through_a_seqno_keeps_every_newer_row_and_seals_the_newest_layer() -> None:
    memtable = Memtable()
    put(memtable, 1, {b"a": b"1"})
    memtable.layers[0].pins += 1
    put(memtable, 2, {b"b": b"2"})  # a layer above the first
    put(memtable, 3, {b"c": b"3"})
    memtable.drop_through(2)
    assert seen(memtable.layers)[b"c"] == (b"3", 3) and b"a" not in seen(memtable.layers)
    put(memtable, 4, {b"d": b"4"})
    memtable.drop_through(3)
    # Sealed by the first call: the rows of batch 4 did not join the layer of batch 3, so that one can go.
    assert seen(memtable.layers) == {b"d": (b"4", 4)}
    memtable.drop_through(4)
    assert memtable.layers == () and memtable.size_bytes == 0


def test_seqnos_are_those_of_the_last_batch_whenever_they_are_asked_for() -> None:
    for asks in ((), (1,), (2,), (1, 2, 3)):
        layer = Layer()
        batches = [[b"a", b"b"], [b"b"], [b"a", b"c", b"a"], [b"c"]]
        for seqno, keys in enumerate(batches, start=1):
            layer.put(seqno, keys, [b"v"] * len(keys), 0)
            if seqno in asks:
                assert layer.seqnos[keys[0]] == seqno
        assert layer.seqnos == {b"a": 3, b"b": 2, b"c": 4}


def test_seqnos_are_worked_out_a_bounded_number_at_a_time() -> None:
    layer = Layer()
    for turn in range(30):
        layer.put(turn + 1, [b"%d/%d" % (turn, number) for number in range(1_000)], [b"v"] * 1_000, 0)
    steps = 1
    while not layer.index_seqnos_step():
        steps += 1
    assert steps >= 30_000 // (2 * SORT_ROWS) and len(layer.seqnos) == 30_000


def test_the_callers_list_of_keys_may_change_after_the_call() -> None:
    layer = Layer()
    keys = [b"a", b"b"]
    layer.put(1, keys, [b"1", b"2"], 0)
    keys.clear()
    assert layer.seqnos == {b"a": 1, b"b": 1}


def test_keys_are_sorted_a_bounded_number_at_a_time() -> None:
    source = random.Random(3)
    keys = [b"%012d" % source.randrange(10**12) for _ in range(5 * SORT_ROWS)]
    layer = Layer()
    layer.put(1, keys, [b"v"] * len(keys), 0)
    assert layer.sorted_keys is None
    steps = 1
    while not layer.sort_step():
        steps += 1
    assert layer.sorted_keys == sorted(set(keys))
    assert steps >= len(layer.values) // SORT_ROWS  # one chunk, or one merge of two runs, in each


def test_a_sorted_layer_takes_a_few_more_keys_in_one_step() -> None:
    layer = Layer()
    layer.put(1, [b"%06d" % number for number in range(0, 20_000, 2)], [b"v"] * 10_000, 0)
    sort(layer)
    layer.put(2, [b"000001", b"000003", b"000000"], [b"w"] * 3, 0)  # the last one is there already
    assert layer.sorted_keys is None
    assert layer.sort_step()
    assert layer.sorted_keys == sorted(layer.values) and len(layer.values) == 10_002


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.binary(min_size=1, max_size=2), st.binary(max_size=3), min_size=1, max_size=8),
            st.sampled_from(["", "", "pin", "unpin", "sort", "freeze", "drop", "thaw"]),
        ),
        max_size=40,
    ),
    st.integers(1, 9),
)
def test_any_order_of_pins_freezes_and_sorting_reads_as_one_dict(
    steps: list[tuple[dict[bytes, bytes], str]], count: int
) -> None:
    memtable = Memtable()
    persisted: Rows = {}
    all_rows: Rows = {}
    pinned: list[tuple[tuple[Layer, ...], Rows]] = []
    for seqno, (rows, then) in enumerate(steps, start=1):
        put(memtable, seqno, rows)
        all_rows.update({key: (value, seqno) for key, value in rows.items()})
        if then == "pin":
            memtable.layers[0].pins += 1
            pinned.append((memtable.layers, {**seen(memtable.layers)}))
        elif then == "unpin" and pinned:
            layers, expected = pinned.pop(0)
            assert seen(layers) == expected
            layers[0].pins -= 1
        elif then == "sort":
            assert sort(memtable.layers[0]) == sorted(memtable.layers[0].values)
        elif then == "freeze" and not memtable.frozen:
            memtable.freeze()
        elif then == "drop" and memtable.frozen:
            persisted.update(seen(memtable.frozen))
            memtable.drop_frozen()
        elif then == "thaw":
            memtable.thaw()
        assert {**persisted, **seen(memtable.layers)} == all_rows
    for layers, expected in pinned:
        assert seen(layers) == expected
    if memtable.frozen:
        memtable.thaw()
    frozen = memtable.freeze()
    expected = seen(frozen)
    for layer in frozen:
        sort(layer)
    written: list[tuple[bytes, tuple[bytes, int]]] = []
    for keys, values, seqnos in frozen_rows(frozen, count) if frozen else ():
        assert len(keys) <= max(count, len(frozen))
        written += [(key, (value, seqno)) for key, value, seqno in zip(keys, values, seqnos, strict=True)]
    assert written == sorted(expected.items())
