"""The authorizer against a model that follows Kafka's documentation rule by rule; and rules as rows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.base.errors import InvalidError
from tidemill.security.acls import (
    CLUSTER_NAME,
    DECISIONS_MAX,
    OPERATIONS,
    AclRule,
    Authorizer,
    Operation,
    Pattern,
    Permission,
    Resource,
    RuleFilter,
    check_rule,
)

NAMES = ["a", "ab", "abc", "b", "*"]
PRINCIPALS = ["User:alice", "User:bob", "User:*"]
HOSTS = ["1.1.1.1", "2.2.2.2", "*"]


def rule(
    operation: Operation,
    name: str = "a",
    *,
    principal: str = "User:alice",
    host: str = "*",
    pattern: Pattern = Pattern.LITERAL,
    permission: Permission = Permission.ALLOW,
    resource: Resource = Resource.TOPIC,
) -> AclRule:
    return AclRule(int(resource), int(pattern), name, principal, host, int(operation), int(permission))


RULES = st.builds(
    rule,
    st.sampled_from([*OPERATIONS[Resource.TOPIC], Operation.ALL]),
    st.sampled_from(NAMES),
    principal=st.sampled_from(PRINCIPALS),
    host=st.sampled_from(HOSTS),
    pattern=st.sampled_from([Pattern.LITERAL, Pattern.PREFIXED]),
    permission=st.sampled_from([Permission.ALLOW, Permission.DENY]),
)

IMPLIED = {
    Operation.DESCRIBE: {Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER},
    Operation.DESCRIBE_CONFIGS: {Operation.ALTER_CONFIGS},
}


def model(rules: list[AclRule], principal: str, host: str, operation: Operation, name: str) -> bool:
    """Reference implementation: check every rule in turn."""

    def applies(each: AclRule) -> bool:
        if each.pattern == Pattern.PREFIXED:
            named = name.startswith(each.name)
        else:
            named = each.name in (name, "*")
        return named and each.principal in (principal, "User:*") and each.host in (host, "*")

    mine = [each for each in rules if applies(each)]
    if any(each.permission == Permission.DENY and each.operation in (operation, Operation.ALL) for each in mine):
        return False
    enough = {operation, Operation.ALL} | IMPLIED.get(operation, set())
    return any(each.permission == Permission.ALLOW and each.operation in enough for each in mine)


@given(st.lists(RULES, max_size=8))
@settings(max_examples=150, deadline=None)
def test_every_decision_is_the_models(rules: list[AclRule]) -> None:
    authorizer = Authorizer(rules)
    for principal, host, name in itertools.product(
        ["User:alice", "User:bob"], ["1.1.1.1", "2.2.2.2"], ["a", "abcd", "b"]
    ):
        for operation in OPERATIONS[Resource.TOPIC]:
            wanted = model(rules, principal, host, operation, name)
            assert authorizer.allows(principal, host, operation, Resource.TOPIC, name) == wanted
            assert authorizer.allows(principal, host, operation, Resource.TOPIC, name) == wanted, "remembered"
            assert not authorizer.allows(principal, host, operation, Resource.GROUP, name), "of another kind"


@given(st.lists(RULES, max_size=6))
@settings(max_examples=150, deadline=None)
def test_who_may_do_it_to_some_resource_is_found(rules: list[AclRule]) -> None:
    """An operation allowed on a named resource is allowed on some resource. The converse does not hold, because a
    denying pattern may cover an allowed one."""
    authorizer = Authorizer(rules)
    names = ["a", "ab", "abc", "abcd", "b", "zz", "*x"]
    for operation in (Operation.WRITE, Operation.DESCRIBE):
        by_name = any(model(rules, "User:alice", "1.1.1.1", operation, name) for name in names)
        some = authorizer.allows_on_any("User:alice", "1.1.1.1", operation, Resource.TOPIC)
        assert some or not by_name


def test_nobody_may_anything_by_default_and_a_super_user_everything() -> None:
    denied = rule(Operation.ALL, "*", principal="User:root", permission=Permission.DENY)
    authorizer = Authorizer([denied], ["User:root"])
    for resource, operations in OPERATIONS.items():
        for operation in operations:
            assert authorizer.allows("User:root", "h", operation, resource, "x")
            assert not authorizer.allows("User:alice", "h", operation, resource, "x")
    assert authorizer.allows_on_any("User:root", "h", Operation.WRITE, Resource.TOPIC)


def test_operations_are_bits() -> None:
    authorizer = Authorizer([rule(Operation.READ)])
    bits = authorizer.allowed_operations("User:alice", "h", Resource.TOPIC, "a")
    assert bits == 1 << Operation.READ | 1 << Operation.DESCRIBE


def test_what_is_remembered_is_bounded() -> None:
    authorizer = Authorizer([rule(Operation.READ)])
    for i in range(DECISIONS_MAX + 10):
        authorizer.allows("User:alice", "h", Operation.READ, Resource.TOPIC, str(i))
    assert len(authorizer._decided) <= DECISIONS_MAX


@pytest.mark.parametrize(
    "bad",
    [
        rule(Operation.READ, ""),
        rule(Operation.READ, "x" * 250),
        rule(Operation.READ, "a\x00"),
        rule(Operation.READ, principal="alice"),
        rule(Operation.READ, principal="User:"),
        rule(Operation.READ, principal="Group:a"),
        rule(Operation.READ, host=""),
        rule(Operation.READ, pattern=Pattern.MATCH),
        rule(Operation.READ, permission=Permission.ANY),
        rule(Operation.CLUSTER_ACTION),
        rule(Operation.ANY),
        rule(Operation.READ, resource=Resource.ANY),
        rule(Operation.ALTER, "mine", resource=Resource.CLUSTER),
        rule(Operation.ALTER, CLUSTER_NAME, resource=Resource.CLUSTER, pattern=Pattern.PREFIXED),
        AclRule(99, 3, "a", "User:a", "*", 3, 3),
        AclRule(2, 3, "a", "User:a", "*", -1, 3),
    ],
)
def test_a_rule_that_means_nothing_is_refused(bad: AclRule) -> None:
    with pytest.raises(InvalidError):
        check_rule(bad)


def test_filters_fit_as_kafkas_do() -> None:
    literal, prefixed, every = (
        rule(Operation.READ, "abc"),
        rule(Operation.READ, "a", pattern=Pattern.PREFIXED),
        rule(Operation.READ, "*"),
    )
    rules = [literal, prefixed, every]
    assert [r for r in rules if RuleFilter(name="abc").matches(r)] == [literal]
    assert [r for r in rules if RuleFilter(name="abc", pattern=Pattern.MATCH).matches(r)] == rules
    assert [r for r in rules if RuleFilter(name="a", pattern=Pattern.PREFIXED).matches(r)] == [prefixed]
    assert [r for r in rules if RuleFilter(name="b", pattern=Pattern.MATCH).matches(r)] == [every]
    assert [r for r in rules if RuleFilter(principal="User:bob").matches(r)] == []
    assert [r for r in rules if RuleFilter(operation=Operation.WRITE).matches(r)] == []
