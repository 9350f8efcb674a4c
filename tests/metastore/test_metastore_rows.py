"""Row families: encoding round trips, the order of keys, and the extent of a prefix."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.base.errors import CorruptError, InvalidError
from tidemill.metastore import rows
from tidemill.metastore.rows.catalogue import TOPICS, PipelineRow, TopicRow
from tidemill.metastore.rows.key_encoding import Column, Kind, entity_of, names_entity
from tidemill.metastore.rows.row_family import Family

EVERY_FAMILY = pytest.mark.parametrize("family", rows.ALL, ids=repr)

TEXTS = st.text(max_size=6) | st.text("\x00\x01\xffa", max_size=4)
"""Texts, some of which resemble the end of a text or its escape."""

NUMBERS = {
    Kind.U32: st.integers(0, 2**32 - 1) | st.integers(0, 300),
    Kind.U64: st.integers(0, 2**64 - 1) | st.integers(0, 300),
}
SIGNED = st.integers(-(2**63), 2**63 - 1)


def key_parts(family: Family[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(*(TEXTS if c.kind is Kind.TEXT else NUMBERS[c.kind] for c in family.columns))


def any_row(family: Family[Any]) -> st.SearchStrategy[Any]:
    """Return rows of a family, with every field drawn by its type."""
    fields = msgspec.structs.fields(family.row)[len(family.columns) :]
    rest = st.tuples(*(value_of(field.type) for field in fields))
    return st.builds(lambda key, values: family.row(*key, *values), key_parts(family), rest)


def value_of(kind: Any) -> st.SearchStrategy[Any]:
    if kind is int:
        return SIGNED
    if kind is str:
        return TEXTS
    if kind is bytes:
        return st.binary(max_size=8)
    if kind is bool:
        return st.booleans()
    if kind is float:
        return st.floats(allow_nan=False)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, *(value_of(field.type) for field in msgspec.structs.fields(kind)))
    arguments = kind.__args__
    if isinstance(kind, UnionType):
        return st.one_of(*(st.none() if each is NoneType else value_of(each) for each in arguments))
    if kind.__origin__ is dict:
        return st.dictionaries(value_of(arguments[0]), value_of(arguments[1]), max_size=2)
    if arguments[-1] is Ellipsis:
        return st.lists(value_of(arguments[0]), max_size=2).map(tuple)
    return st.tuples(*(value_of(argument) for argument in arguments))


@EVERY_FAMILY
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_row_survives_its_bytes(family: Family[Any], data: st.DataObject) -> None:
    row = data.draw(any_row(family))
    key, value = family.encode(row)
    assert value, "the empty value is a tombstone"
    assert rows.BY_TAG[key[0]] is family
    assert family.decode(key, value) == row


@EVERY_FAMILY
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_order_of_keys_is_the_order_of_their_columns(family: Family[Any], data: st.DataObject) -> None:
    some = data.draw(st.lists(key_parts(family), min_size=2, max_size=8))
    assert sorted(some) == [family.decode_key(key) for key in sorted(family.key(*parts) for parts in some)]


@EVERY_FAMILY
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_prefix_holds_exactly_the_rows_that_begin_with_its_columns(family: Family[Any], data: st.DataObject) -> None:
    some = data.draw(st.lists(key_parts(family), min_size=1, max_size=8))
    count = data.draw(st.integers(0, len(family.columns)))
    wanted = data.draw(st.sampled_from(some) | key_parts(family))[:count]
    prefix = family.prefix(*wanted)
    found = {family.decode_key(key) for key in map(lambda p: family.key(*p), some) if key.startswith(prefix)}
    assert found == {parts for parts in some if parts[:count] == wanted}


@EVERY_FAMILY
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_all_rows_of_an_entity_have_its_bytes_and_no_other_entity_has_them(
    family: Family[Any], data: st.DataObject
) -> None:
    one, other = data.draw(key_parts(family)), data.draw(key_parts(family))
    if family.tag < 0x10 or 0x70 <= family.tag < 0x80:  # rows of the catalogue itself, and of the registry
        assert entity_of(family.key(*one)) == entity_of(family.key(*other)) == b""
        return
    same = entity_of(family.key(*one)) == entity_of(family.key(*other))
    assert same == (one[0] == other[0])
    assert names_entity(family.prefix(one[0]))
    assert not names_entity(family.prefix())


def test_every_family_has_a_tag_of_its_own_and_none_has_the_domains() -> None:
    assert len(rows.BY_TAG) == len(rows.ALL)
    assert 0 not in rows.BY_TAG


def test_the_bytes_of_a_key_are_as_drawn() -> None:
    extent = rows.EXTENTS.key("t\x00x", 2, 258)
    assert extent == b"\x11" + b"t\x00\xffx\x00\x01" + b"\x00\x00\x00\x02" + b"\x00\x00\x00\x00\x00\x00\x01\x02"
    assert TOPICS.key("clicks") == b"\x01" + b"\x00\x01" + b"clicks\x00\x01"


def test_a_row_written_before_a_field_existed_gets_its_default_and_a_newer_ones_extra_is_ignored() -> None:
    key = TOPICS.key("t")
    older = b"\x01" + msgspec.msgpack.encode(["id", 3])
    newer = b"\x01" + msgspec.msgpack.encode(["id", 3, "stream", 7, {}, "what a later version added"])
    assert TOPICS.decode(key, older) == TopicRow("t", "id", 3)
    assert TOPICS.decode(key, newer) == TopicRow("t", "id", 3, "stream", 7)


def test_a_value_of_a_newer_format_names_both_and_says_to_upgrade() -> None:
    with pytest.raises(InvalidError, match=r"format=09 known=1.*Upgrade"):
        TOPICS.decode(TOPICS.key("t"), b"\x09\x90")


@pytest.mark.parametrize("value", [b"\x01", b"\x01\xc1", b"\x01" + msgspec.msgpack.encode(["id", "three"])])
def test_a_damaged_value_is_corrupt_and_named(value: bytes) -> None:
    with pytest.raises(CorruptError, match="family=topic"):
        TOPICS.decode(TOPICS.key("t"), value)


@pytest.mark.parametrize("key", [b"\x01", b"\x01\x00\x01abc", b"\x01\x00\x01a\x00\x01more", b"\x10abc\x00\x01\x00\x00"])
def test_a_damaged_key_is_corrupt(key: bytes) -> None:
    with pytest.raises(CorruptError):
        rows.BY_TAG[key[0]].decode_key(key)


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        (rows.PARTITIONS, ("t", -1)),
        (rows.PARTITIONS, ("t", 2**32)),
        (rows.EXTENTS, ("t", 0, 2**64)),
        (rows.EXTENTS, ("t", 0, "nine")),
        (rows.TOPICS, (7,)),
        (rows.TOPICS, ("\ud800",)),
    ],
)
def test_a_value_that_does_not_fit_a_key_is_invalid(family: Family[Any], parts: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidError, match="a key cannot hold this value"):
        family.key(*parts)


def test_a_key_needs_all_its_columns() -> None:
    with pytest.raises(InvalidError, match="has 3 columns: given=2"):
        rows.EXTENTS.key("t", 0)


def test_a_family_whose_key_is_not_first_in_its_row_is_a_mistake() -> None:
    with pytest.raises(TypeError):
        Family(0x7E, "wrong", TopicRow, Column("topic_id", Kind.TEXT))


def test_a_pipeline_of_an_older_version_names_no_inputs() -> None:
    key = rows.PIPELINES.key("p")
    old = b"\x01" + msgspec.msgpack.encode([{"sums": "derived"}, "p.dead_letters"])
    assert rows.PIPELINES.decode(key, old) == PipelineRow("p", {"sums": "derived"}, "p.dead_letters")
