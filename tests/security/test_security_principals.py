"""Rules that map distinguished names to principals, like Kafka's ssl.principal.mapping.rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.base.errors import InvalidError
from tidemill.security.principals import principal_rules

NAME = "CN=kafka-1.Example.com,OU=Servers,O=Harbour"


@pytest.mark.parametrize(
    ("rules", "principal"),
    [
        (["DEFAULT"], f"User:{NAME}"),
        ([r"RULE:^CN=(.*?),OU=(.*?),.*$/$1@$2/"], "User:kafka-1.Example.com@Servers"),
        ([r"RULE:CN=([^,]*),.*/$1/L"], "User:kafka-1.example.com"),
        ([r"RULE:CN=([^,]*),.*/$1/U"], "User:KAFKA-1.EXAMPLE.COM"),
        ([r"RULE:CN=nobody/x/", "DEFAULT"], f"User:{NAME}"),
        ([r"RULE:CN=nobody/x/"], None),
        ([r"RULE:CN=([^.]*)\..*/a\/$1/"], "User:a/kafka-1"),
        ([r"RULE:.*/\$1/"], "User:$1"),
        ([r"RULE:CN/part/"], None),
        ([], None),
    ],
)
def test_the_first_rule_that_matches_the_whole_name_decides(rules: list[str], principal: str | None) -> None:
    assert principal_rules(rules)(NAME) == principal


@pytest.mark.parametrize("rule", ["", "default", "RULE:a", "RULE:a/b", "RULE:(/x/", "RULE:a/$1/", "RULE:a/b/X", "x"])
def test_a_rule_that_cannot_be_read_is_named(rule: str) -> None:
    with pytest.raises(InvalidError, match="rule"):
        principal_rules([rule])


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_rule_is_refused_or_gives_an_answer(rule: str, name: str) -> None:
    try:
        principal_of = principal_rules([f"RULE:{rule}"])
    except InvalidError:
        return
    found = principal_of(name)
    assert found is None or found.startswith("User:")
