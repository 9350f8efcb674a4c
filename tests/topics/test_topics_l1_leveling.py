from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from support.topics.world import batch
from tidemill.metastore.rows.l1 import L1ExtentRow
from tidemill.topics.batch import patch_base_offset
from tidemill.topics.l1.builder import ObjectBuilder
from tidemill.topics.l1.extent_merge import FANOUT, find_mergeable_run, merge_run
from tidemill.topics.l1.format import decode_index

TARGET = 32 << 20


def extents_of(sizes: list[int]) -> list[L1ExtentRow]:
    return [L1ExtentRow("t", 0, 10 * i, 10 * i + 9, 0, 0, f"o{i}", 0, size, 1, size, 9) for i, size in enumerate(sizes)]


def merged(extents: list[L1ExtentRow], target: int = TARGET) -> tuple[list[L1ExtentRow], int]:
    """Merge until no run is left. Return the remaining extents and the number of rewritten bytes."""
    rewritten = 0
    while run := find_mergeable_run(extents, target):
        size = sum(extent.size_bytes for extent in run)
        rewritten += size
        at = extents.index(run[0])
        one = L1ExtentRow("t", 0, run[0].base_offset, run[-1].last_offset, 0, 0, "m", 0, size, len(run), size, 9)
        extents = [*extents[:at], one, *extents[at + len(run) :]]
    return extents, rewritten


def test_a_month_of_small_extents_becomes_a_few_and_each_byte_is_copied_a_few_times() -> None:
    extents: list[L1ExtentRow] = []
    rewritten = most = 0
    for number in range(4_320):
        extents += [L1ExtentRow("t", 0, number, number, 0, 0, "o", 0, 4096, 1, 4096, 9)]
        extents, more = merged(extents)
        rewritten, most = rewritten + more, max(most, len(extents))
    assert most < 40 and rewritten <= 6 * 4_320 * 4096


def test_a_large_extent_is_not_copied_for_the_sake_of_small_ones() -> None:
    assert find_mergeable_run(extents_of([TARGET // 2, *[4096] * (FANOUT - 1)]), TARGET) == ()
    assert len(find_mergeable_run(extents_of([TARGET // 2, *[4096] * FANOUT]), TARGET)) == FANOUT


def test_extents_without_batches_go_with_their_neighbours() -> None:
    assert len(find_mergeable_run(extents_of([0, 10, 10, 10, 0, 0, 0, 10]), TARGET)) == 8
    assert len(find_mergeable_run(extents_of([0] * 8), TARGET)) == 8


@given(st.lists(st.integers(1, TARGET * 2), max_size=60))
def test_runs_are_neighbours_that_fit_and_what_is_left_is_bounded(sizes: list[int]) -> None:
    extents, _ = merged(extents_of(sizes))
    assert sum(extent.size_bytes for extent in extents) == sum(sizes)
    assert all(one.last_offset + 1 == other.base_offset for one, other in pairwise(extents))
    assert all(extent.size_bytes <= max(TARGET, *sizes) for extent in extents)


def test_extents_with_a_gap_between_them_are_not_merged() -> None:
    extents = extents_of([10] * (2 * FANOUT - 2))
    del extents[FANOUT - 1]
    assert find_mergeable_run(extents, TARGET) == ()


def test_a_merged_range_holds_the_batches_of_its_extents_in_order() -> None:
    build = ObjectBuilder("t")
    for base, starts in ((5, (4, 6)), (8, (8, 10))):  # the first extent begins within its first batch
        build.begin_range(0, base)
        for start in starts:
            data = bytearray(batch(f"{start}", "more"))
            patch_base_offset(data, 0, start)
            build.add(bytes(data), start, start + 2, start)
        build.end(starts[-1] + 2)
    parts, footer = build.finish()
    whole = b"".join(parts)
    rows, held = [], []
    for r in footer.regions:
        rows.append(
            L1ExtentRow(
                "t",
                0,
                r.base_offset,
                r.last_offset,
                0,
                0,
                "o",
                r.first_byte,
                r.size_bytes,
                2,
                r.index_byte,
                r.index_bytes,
            )
        )
        index = decode_index(whole[r.index_byte : r.index_byte + r.index_bytes], r)
        held.append((index, whole[r.first_byte : r.first_byte + r.size_bytes]))
    again = ObjectBuilder("t")
    merge_run(again, rows, held)
    parts, merged_footer = again.finish()
    [region] = merged_footer.regions
    assert (region.base_offset, region.last_offset, region.batch_count) == (5, 11, 4)
    data = b"".join(parts)
    assert data[: region.size_bytes] == whole[: region.size_bytes]
    index = decode_index(data[region.index_byte : region.index_byte + region.index_bytes], region)
    assert index.bases.tolist() == [4, 6, 8, 10] and index.ends.tolist() == [6, 8, 10, 12]
