"""Batches, bounds and options of one LSM database as strategies of Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from tidemill.metastore.lsm.options import Options

keys = st.one_of(
    st.sampled_from([b"a", b"a\x00", b"a\xff", b"a\xff\xff", b"b", b"\xff", b"\xff\xff"]),
    st.integers(0, 60).map(lambda number: b"k/%02d" % number),
    st.integers(0, 30).map(lambda number: b"long/common/prefix/%02d" % number),
)

values = st.one_of(st.just(b""), st.binary(min_size=1, max_size=40))

batches = st.lists(st.tuples(keys, values), min_size=1, max_size=12)

bounds = st.one_of(keys, st.just(b""))

options = st.builds(
    Options,
    write_buffer_bytes=st.sampled_from([1_000, 5_000, 1 << 20]),
    block_bytes=st.sampled_from([40, 200, 8_192]),
    file_bytes=st.sampled_from([200, 2_000]),
    cache_bytes=st.sampled_from([0, 3_000, 1 << 20]),
    bloom_bits_per_key=st.sampled_from([0, 12]),
    l0_compact=st.just(2),
    l0_slow=st.just(4),
    l0_stop=st.just(6),
    level_base_bytes=st.sampled_from([300, 3_000]),
    level_factor=st.just(3),
    levels=st.sampled_from([2, 3, 7]),
    slice_rows=st.sampled_from([1, 5, 1_000]),
    gc_delay_ms=st.just(0),
    manifests_kept=st.just(1),
)
