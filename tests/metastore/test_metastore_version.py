"""Versions: the files that a look-up reads, their order, and permitted edits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.metastore.lsm_files import meta
from tidemill.base.errors import ConflictError, InvalidError
from tidemill.metastore.lsm.version import EMPTY_VERSION, Edit, Version

N1, N2 = meta(1, b"c", b"g"), meta(2, b"a", b"e")
D1, D2, D3 = meta(3, b"b", b"d"), meta(4, b"f", b"h"), meta(5, b"m", b"m")
E1 = meta(6, b"a", b"z")
VERSION = Version(((N2, N1), (D1, D2, D3), (), (E1,)), last_seqno=9)


@pytest.mark.parametrize(
    ("key", "files"),
    [
        (b"a", [N2, E1]),
        (b"c", [N2, N1, D1, E1]),
        (b"e", [N2, N1, E1]),  # between two files of level 1: neither is asked
        (b"f", [N1, D2, E1]),
        (b"m", [D3, E1]),
        (b"n", [E1]),
        (b"zz", []),
        (b"A", []),
    ],
)
def test_a_look_up_asks_newest_first_and_only_files_whose_range_holds_the_key(key: bytes, files: list[object]) -> None:
    assert list(VERSION.candidates(key)) == files


def test_runs_are_each_file_of_level_0_and_the_part_of_each_level_that_the_range_touches() -> None:
    assert list(VERSION.runs(b"", None)) == [(N2,), (N1,), (D1, D2, D3), (E1,)]
    assert list(VERSION.runs(b"e", b"f")) == [(N2,), (N1,), (E1,)]
    assert list(VERSION.runs(b"e\x00", b"f\x00")) == [(N1,), (D2,), (E1,)]
    assert list(VERSION.runs(b"h", b"m")) == [(D2,), (E1,)]
    assert list(VERSION.runs(b"zz", None)) == []


@settings(deadline=None)
@given(st.sets(st.integers(0, 60), max_size=12), st.integers(0, 61), st.none() | st.integers(0, 61))
def test_the_part_of_a_level_is_exactly_the_files_with_a_key_in_the_range(
    ends: set[int], lower: int, upper: int | None
) -> None:
    def key(number: int) -> bytes:
        return b"%03d" % number

    cuts = sorted(ends)
    level = tuple(
        meta(number, key(a), key(b)) for number, (a, b) in enumerate(zip(cuts[::2], cuts[1::2], strict=False))
    )
    low, high = key(lower), None if upper is None else key(upper)
    touched = tuple(
        file
        for file in level
        if file.largest >= low and (high is None or file.smallest < high) and (not high or low < high)
    )
    found = [run for run in Version(((), level)).runs(low, high) if high is None or low < high]
    assert found == ([touched] if touched else [])
    if upper is not None and lower <= upper:
        assert Version(((), level)).overlapping(1, low, key(upper)) == tuple(
            file for file in level if file.largest >= low and file.smallest <= key(upper)
        )


def test_an_edit_removes_then_adds_and_leaves_the_old_version_as_it_was() -> None:
    new = meta(7, b"b", b"h")
    after = VERSION.apply_edit(Edit(added=((1, new),), removed=(N1, D1, D2)))
    assert after.levels == ((N2,), (new, D3), (), (E1,)) and after.last_seqno == 9
    assert VERSION.levels[0] == (N2, N1)
    flushed = after.apply_edit(Edit(added=((0, N1),), last_seqno=12))
    assert flushed.levels[0] == (N1, N2) and flushed.last_seqno == 12  # newest first
    moved = flushed.apply_edit(Edit(added=((5, E1),), removed=(E1,)))
    assert moved.levels == ((N1, N2), (new, D3), (), (), (), (E1,))
    assert EMPTY_VERSION.apply_edit(Edit(added=((0, N1),), last_seqno=1)).levels == ((N1,),)


def test_an_edit_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConflictError, match="not live: files=1-7"):
        VERSION.apply_edit(Edit(removed=(meta(7, b"a", b"b"),)))
    with pytest.raises(InvalidError, match="overlap: level=1 left=1-3 right=1-7"):
        VERSION.apply_edit(Edit(added=((1, meta(7, b"d", b"e")),)))
