"""Names of tables and topics: any two tables have two topics, and every topic name identifies its table."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidemill.base.errors import InvalidError
from tidemill.capture.naming import split_name, table_name, topic_name
from tidemill.metastore.catalogue import TOPIC_NAME_LENGTH, check_topic_name

PARTS = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1, max_size=63)
ODD = st.text('a._x5fh" ', min_size=1, max_size=6)
PART = PARTS | ODD


def test_plain_names_stay_as_they_are() -> None:
    assert table_name("public", "Order-Items_2") == "public.Order-Items_2"
    assert topic_name("shop", "public", "Order-Items_2") == "shop.public.Order-Items_2"
    assert split_name("orders") == ("public", "orders")


@given(PART, PART, PART, PART)
@example("a.b", "c", "a", "b.c")
@example("a", "_x20", "a", " ")
@example("a", "_x5fx20", "a", "_x20")
def test_two_tables_have_two_names_and_two_topics(s1: str, t1: str, s2: str, t2: str) -> None:
    same = (s1, t1) == (s2, t2)
    assert (table_name(s1, t1) == table_name(s2, t2)) == same
    assert (topic_name("c", s1, t1) == topic_name("c", s2, t2)) == same


@given(PART, PART)
def test_a_name_leads_back_to_the_table_and_its_topic_may_be_made(schema: str, table: str) -> None:
    assert split_name(table_name(schema, table)) == (schema, table)
    check_topic_name(topic_name("shop", schema, table))


def test_a_very_long_name_is_hashed() -> None:
    one, other = (topic_name("shop", "é" * 31, "ü" * 30 + last) for last in "xy")
    assert one != other
    assert len(one) == len(other) == TOPIC_NAME_LENGTH
    check_topic_name(one)


@pytest.mark.parametrize("name", ["", ".", "a.", ".a", "a.b.c", 'a."b', 'a"b', '"a"b.c'])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidError):
        split_name(name)
