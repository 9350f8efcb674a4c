from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.base.errors import Corrupt
from tidemill.topics.fetch import choose
from tidemill.topics.l0.cache import ObjectCache
from tidemill.topics.l0.format import Region, decode_footer, encode_footer, object_key

regions = st.lists(
    st.builds(
        Region,
        topic_id=st.text(max_size=20),
        partition=st.integers(0, 2**32 - 1),
        position=st.integers(0, 2**40),
        length=st.integers(0, 2**40),
    ),
    max_size=20,
)


@given(regions, st.binary(max_size=50))
def test_a_footer_is_found_from_the_end(rows: list[Region], before: bytes) -> None:
    assert decode_footer(before + encode_footer(rows)) == rows


@given(regions, st.data())
def test_any_damage_to_a_footer_is_noticed(rows: list[Region], data: st.DataObject) -> None:
    footer = bytearray(encode_footer(rows))
    at = data.draw(st.integers(0, len(footer) - 1))
    footer[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Corrupt):
        decode_footer(footer)


def test_keys_list_in_epoch_order() -> None:
    keys = [object_key(epoch, "n", 255) for epoch in (2, 10, 9)]
    assert sorted(keys) == [keys[0], keys[2], keys[1]]


def test_the_cache_keeps_its_budget_and_drops_the_oldest() -> None:
    cache = ObjectCache(100)
    for number in range(5):
        cache.add(str(number), bytearray(40))
    assert (cache.bytes_held, len(cache)) == (80, 2)
    assert cache.get("2") is None and cache.get("4") is not None
    cache.add("large", bytearray(500))
    assert (cache.bytes_held, len(cache)) == (0, 0)


def test_choose_takes_whole_batches() -> None:
    sizes = [10, 20, 30]
    assert choose(sizes, 0, 30, 9, at_least_one=False) == (2, 30)
    assert choose(sizes, 0, 99, 1, at_least_one=False) == (1, 10)
    assert choose(sizes, 1, 5, 9, at_least_one=True) == (2, 20)
    assert choose(sizes, 1, 5, 9, at_least_one=False) == (1, 0)
    assert choose(sizes, 3, 5, 9, at_least_one=True) == (3, 0)
