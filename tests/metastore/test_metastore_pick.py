"""Selection of the files of a merge: scores, overlaps, moves, tombstones; as examples and as properties."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from support.metastore.lsm_files import Shelf, meta
from tidemill.metastore.lsm.compaction.picker import Job, pick_full_compaction, pick_job, scores, target_bytes
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options

OPTIONS = Options(l0_compact=2, l0_slow=4, l0_stop=6, level_base_bytes=1000, level_factor=10, file_bytes=500, levels=4)
MOVING = Options(l0_compact=2, l0_slow=4, l0_stop=6, level_base_bytes=1000, level_factor=10, file_bytes=4, levels=4)
"""Files count as small below 1 byte: nothing is merged just because it is small."""


def test_nothing_is_due_below_every_limit() -> None:
    assert pick_job(((meta(1, b"a", b"b"),),), OPTIONS, {}) is None
    assert pick_job(((), (meta(1, b"a", b"b", size_bytes=999),)), OPTIONS, {}) is None
    assert pick_job(((),), OPTIONS, {}) is None
    assert pick_job((), OPTIONS, {}) is None


def test_the_highest_score_goes_first() -> None:
    l0 = tuple(meta(n, b"a", b"z") for n in (4, 3, 2))
    l1 = (meta(1, b"a", b"z", size_bytes=2000),)
    assert [level for _, level in scores((l0, l1), OPTIONS)] == [1, 0]
    job = pick_job((l0, l1), OPTIONS, {})
    assert job is not None and job.level == 1
    job = pick_job((l0, (meta(1, b"a", b"z", size_bytes=1000),)), OPTIONS, {})
    assert job is not None and job.level == 0


def test_level_targets_grow_by_the_factor_and_the_deepest_level_is_never_a_source() -> None:
    assert [target_bytes(level, OPTIONS) for level in (1, 2, 3)] == [1000, 10_000, 100_000]
    deepest = (meta(1, b"a", b"z", size_bytes=10**9),)
    assert pick_job(((), (), (), deepest), OPTIONS, {}) is None


def test_level_0_takes_what_overlaps_transitively_and_leaves_the_rest() -> None:
    newest, other, middle, oldest = meta(9, b"f", b"k"), meta(8, b"x", b"y"), meta(7, b"c", b"g"), meta(6, b"a", b"d")
    l1 = (meta(1, b"a", b"b"), meta(2, b"k", b"l"), meta(3, b"m", b"n"))
    job = pick_job(((newest, other, middle, oldest), l1), MOVING, {})
    assert job is not None and not job.move
    assert job.runs == ((l1[0], l1[1]), (oldest,), (middle,), (newest,))
    assert (job.level, job.target) == (0, 1)


def test_level_0_files_that_touch_nothing_move_together() -> None:
    a, b, c = meta(3, b"a", b"b"), meta(4, b"c", b"d"), meta(5, b"e", b"f")
    job = pick_job(((c, b, a), (meta(1, b"x", b"z"),)), MOVING, {})
    assert job is not None and job.move and job.inputs == (a, b, c)
    # One of them overlaps below: it waits for its own merge.
    job = pick_job(((c, b, a), (meta(1, b"d", b"d"),)), MOVING, {})
    assert job is not None and job.move and job.inputs == (a, c)


def test_a_deeper_level_goes_round_robin() -> None:
    l1 = tuple(meta(n, bytes([n]), bytes([n]), size_bytes=600) for n in range(10, 13))
    taken = []
    pointers: dict[int, bytes] = {}
    for _ in range(4):
        job = pick_job(((), l1), MOVING, pointers)
        assert job is not None and job.level == 1 and job.move
        taken.append(job.inputs[0].number)
        pointers[1] = job.inputs[0].largest
    assert taken == [10, 11, 12, 10]


def test_a_small_neighbour_joins_instead_of_lying_beside_the_new_file() -> None:
    """Frequent small flushes of ascending keys must not accumulate one tiny file each."""
    l1 = (meta(1, b"a", b"b", size_bytes=500), meta(2, b"c", b"d", size_bytes=100), meta(3, b"e", b"f", size_bytes=90))
    job = pick_job(((meta(5, b"i", b"j", size_bytes=50), meta(4, b"g", b"h", size_bytes=50)), l1), OPTIONS, {})
    assert job is not None and not job.move
    assert job.runs == ((l1[1], l1[2]), (meta(4, b"g", b"h", size_bytes=50),))


def test_a_neighbour_much_larger_than_the_job_stays() -> None:
    l1 = (meta(2, b"c", b"d", size_bytes=101),)
    job = pick_job(((meta(5, b"i", b"j", size_bytes=10), meta(4, b"g", b"h", size_bytes=10)), l1), OPTIONS, {})
    assert job is not None and job.move


def test_older_ranges_are_those_below_the_target_only() -> None:
    l0 = (meta(9, b"c", b"m"), meta(8, b"c", b"m"))
    l1 = (meta(7, b"a", b"d"), meta(6, b"q", b"r"))
    l2 = (meta(5, b"a", b"a"), meta(4, b"k", b"p"), meta(3, b"q", b"z"))
    l3 = (meta(2, b"0", b"b"), meta(1, b"o", b"o"))
    job = pick_job((l0, l1, l2, l3), MOVING, {})
    assert job is not None
    assert job.older == ((b"0", b"b"), (b"k", b"p"))


def test_a_file_with_tombstones_does_not_sink_to_the_bottom_as_it_is() -> None:
    """A move to a level below which nothing needs the tombstones would keep them forever. Otherwise they move down with
    the file."""
    l0 = (meta(2, b"e", b"f", tombstones=1), meta(1, b"a", b"b", tombstones=1))
    job = pick_job((l0,), MOVING, {})
    assert job is not None and not job.move and job.runs == ((l0[1],),)
    job = pick_job((l0, (), (meta(9, b"0", b"z"),)), MOVING, {})
    assert job is not None and job.move and job.inputs == (l0[1], l0[0])


def test_settle_rewrites_a_last_level_that_holds_tombstones() -> None:
    only = (meta(1, b"a", b"b"), meta(2, b"c", b"d", tombstones=3))
    job = pick_full_compaction(((), (), only), OPTIONS)
    assert job is not None and job.runs == (only,) and job.target == 2 and not job.move


def test_settle_takes_everything_into_the_deepest_level_in_use() -> None:
    levels = ((meta(5, b"a", b"z"), meta(4, b"a", b"z")), (meta(3, b"a", b"z"),), (meta(2, b"a", b"z"),))
    job = pick_full_compaction(levels, OPTIONS)
    assert job is not None and job.target == 2 and not job.older and not job.move
    assert [file.number for file in job.inputs] == [2, 3, 4, 5]


def test_settle_goes_deeper_when_the_data_is_too_large_for_the_level() -> None:
    job = pick_full_compaction(((meta(1, b"a", b"z", size_bytes=5000),),), OPTIONS)
    assert job is not None and job.target == 2


def test_settle_has_nothing_to_do_when_all_is_in_one_level() -> None:
    assert pick_full_compaction(((), (meta(1, b"a", b"b"), meta(2, b"c", b"d"))), OPTIONS) is None
    assert pick_full_compaction(((),), OPTIONS) is None


# properties ------------------------------------------------------------------------------------------

keys = st.binary(min_size=1, max_size=2)


@st.composite
def some_levels(draw: st.DrawFn) -> tuple[tuple[FileMeta, ...], ...]:
    numbers = iter(range(1000, 0, -1))
    sizes = st.integers(1, 3000)
    tombstones = st.integers(0, 1)

    def file(low: bytes, high: bytes) -> FileMeta:
        return meta(next(numbers), min(low, high), max(low, high), size_bytes=draw(sizes), tombstones=draw(tombstones))

    levels = [tuple(file(draw(keys), draw(keys)) for _ in range(draw(st.integers(0, 7))))]
    for _ in range(draw(st.integers(0, 3))):
        bounds = sorted(draw(st.sets(keys, max_size=10)))
        levels.append(tuple(file(low, high) for low, high in zip(bounds[::2], bounds[1::2], strict=False)))
    return tuple(levels)


def overlap(a: FileMeta, b: FileMeta) -> bool:
    return a.smallest <= b.largest and b.smallest <= a.largest


def age(levels: tuple[tuple[FileMeta, ...], ...], file: FileMeta) -> tuple[int, int]:
    """Return the age for comparisons: greater is older, where ranges overlap."""
    level = next(n for n, files in enumerate(levels) if file in files)
    return level, levels[0].index(file) if level == 0 else 0


@settings(max_examples=400, deadline=None)
@given(some_levels(), st.dictionaries(st.integers(1, 3), keys), st.sampled_from([OPTIONS, MOVING]))
def test_a_picked_job_keeps_every_rule(
    levels: tuple[tuple[FileMeta, ...], ...], pointers: dict[int, bytes], options: Options
) -> None:
    job = pick_job(levels, options, pointers)
    due = [level for score, level in scores(levels, options) if score >= 1]
    assert (job is None) == (not due)
    if job is not None:
        assert job.level == due[0] and job.target == job.level + 1
        check_job(levels, job)


@settings(max_examples=200, deadline=None)
@given(some_levels())
def test_a_settling_job_keeps_every_rule(levels: tuple[tuple[FileMeta, ...], ...]) -> None:
    job = pick_full_compaction(levels, OPTIONS)
    if job is None:
        assert not levels[0] and sum(1 for files in levels if files) <= 1
        assert not any(file.tombstones for files in levels for file in files)
    else:
        assert set(job.inputs) == {file for files in levels for file in files}
        check_job(levels, job)


def check_job(levels: tuple[tuple[FileMeta, ...], ...], job: Job) -> None:
    inside = set(job.inputs)
    assert inside and len(inside) == len(job.inputs)
    outside = [file for files in levels for file in files if file not in inside]
    sources = [file for file in inside if age(levels, file)[0] < job.target]
    # Runs are sorted and disjoint, and go from oldest to newest where they overlap.
    for run in job.runs:
        assert run
        for left, right in pairwise(run):
            assert left.largest < right.smallest
    for at, run in enumerate(job.runs):
        for newer in job.runs[at + 1 :]:
            for old in run:
                for new in newer:
                    assert not overlap(old, new) or age(levels, old) > age(levels, new)
    for file in outside:
        level = age(levels, file)[0]
        for taken in sources:
            # P1, P2: nothing that goes down passes an older file above or in the target.
            if level <= job.target and overlap(file, taken):
                assert age(levels, file) < age(levels, taken)
        for taken in inside:
            # P3: where an older file outside may hold a key, the job knows of it.
            if overlap(file, taken) and age(levels, file) > age(levels, taken) and not job.move:
                low, high = max(file.smallest, taken.smallest), min(file.largest, taken.largest)
                assert any(a <= low and high <= b for a, b in job.older)
    if job.move:
        for file in inside:
            below = [other for files in levels[job.target + 1 :] for other in files]
            assert not file.tombstones or any(overlap(file, other) for other in below)
    # The outputs fit between the target's other files: no input hull part between two inputs holds one.
    hulls = list(job.runs) if job.move else [tuple(job.inputs)]
    for hull in hulls:
        low, high = min(f.smallest for f in hull), max(f.largest for f in hull)
        neighbours = [f for f in levels[job.target] if f not in inside] if job.target < len(levels) else []
        if not job.move:
            assert not [f for f in neighbours if f.smallest <= high and low <= f.largest]
        else:
            assert not [f for f in neighbours for moved in hull if overlap(f, moved)]
    for left, right in pairwise(job.older):
        assert left[1] < right[0]


operations = st.lists(
    st.one_of(
        st.dictionaries(st.binary(min_size=1, max_size=1), st.sampled_from([b"", b"v", b"w" * 30]), min_size=1),
        st.just("pick"),
        st.just("settle"),
    ),
    max_size=30,
)

TINY = Options(
    l0_compact=2,
    l0_slow=4,
    l0_stop=6,
    level_base_bytes=600,
    level_factor=2,
    file_bytes=300,
    block_bytes=32,
    levels=4,
    slice_rows=3,
)


@settings(max_examples=150, deadline=None)
@given(operations)
def test_levels_read_the_same_whatever_was_merged(steps: list[dict[bytes, bytes] | str]) -> None:
    asyncio.run(merge_and_compare(steps))


async def merge_and_compare(steps: list[dict[bytes, bytes] | str]) -> None:
    shelf = Shelf(TINY)
    shadow: dict[bytes, tuple[bytes, int]] = {}
    pointers: dict[int, bytes] = {}
    for seqno, step in enumerate(steps, start=1):
        if isinstance(step, dict):
            await shelf.flush(step, seqno)
            shadow.update({key: (value, seqno) for key, value in step.items()})
        else:
            levels = shelf.version.levels
            job = pick_job(levels, TINY, pointers) if step == "pick" else pick_full_compaction(levels, TINY)
            if job is not None:
                await shelf.do(job)
                if job.level:
                    pointers[job.level] = job.runs[-1][-1].largest
        assert await shelf.seen() == {key: row for key, row in sorted(shadow.items()) if row[0]}
    if (job := pick_full_compaction(shelf.version.levels, TINY)) is not None:
        await shelf.do(job)
        assert await shelf.tombstones() == 0
