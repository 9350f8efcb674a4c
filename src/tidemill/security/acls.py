"""Authorization: Kafka's ACLs as a pure function of the rules. No I/O, no clock.

A rule allows or denies one operation on one resource, or on all resources whose names share a prefix, to one principal
from one host. Decisions are those of Kafka's AclAuthorizer (KIP-11, KIP-290):

- A super user may do everything. Otherwise a denying rule overrides every allowing rule, and an operation that no rule
  allows is denied.
- Allowing READ, WRITE, DELETE or ALTER also allows DESCRIBE; allowing ALTER_CONFIGS also allows DESCRIBE_CONFIGS. A
  denial implies nothing beyond its own operation. ALL stands for every operation.
- `*` as a literal name, as a host, or in `User:*` matches everything.

Hosts are compared in the form that `canonical_host` returns, so that every notation of an address is the same client.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final

import msgspec

from tidemill.base.address import canonical_host
from tidemill.base.errors import InvalidError
from tidemill.security.principals import NAME_CHARS_MAX


class Resource(IntEnum):
    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5


class Operation(IntEnum):
    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


class Pattern(IntEnum):
    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class Permission(IntEnum):
    ANY = 1
    DENY = 2
    ALLOW = 3


CLUSTER_NAME: Final = "kafka-cluster"
WILDCARD: Final = "*"
ANY_PRINCIPAL: Final = "User:*"
RESOURCE_CHARS_MAX: Final = 249
DECISIONS_MAX: Final = 10_000
"""Limit of cached decisions. The cache lasts until the rules change."""

_O = Operation
OPERATIONS: Final = {
    Resource.TOPIC: (
        *(_O.READ, _O.WRITE, _O.CREATE, _O.DESCRIBE, _O.DELETE, _O.ALTER, _O.DESCRIBE_CONFIGS, _O.ALTER_CONFIGS),
    ),
    Resource.GROUP: (_O.READ, _O.DESCRIBE, _O.DELETE, _O.DESCRIBE_CONFIGS, _O.ALTER_CONFIGS),
    Resource.CLUSTER: (
        *(_O.CREATE, _O.CLUSTER_ACTION, _O.DESCRIBE_CONFIGS, _O.ALTER_CONFIGS, _O.IDEMPOTENT_WRITE),
        *(_O.ALTER, _O.DESCRIBE),
    ),
    Resource.TRANSACTIONAL_ID: (_O.DESCRIBE, _O.WRITE),
}
"""Operations that exist for each kind of resource."""

_ALLOWED_BY: Final = {
    _O.DESCRIBE: frozenset({_O.ALL, _O.DESCRIBE, _O.READ, _O.WRITE, _O.DELETE, _O.ALTER}),
    _O.DESCRIBE_CONFIGS: frozenset({_O.ALL, _O.DESCRIBE_CONFIGS, _O.ALTER_CONFIGS}),
}


class AclRule(msgspec.Struct, frozen=True, order=True):
    resource: int
    pattern: int
    name: str
    principal: str
    host: str
    operation: int
    permission: int


def check_rule(rule: AclRule) -> None:
    """Raise InvalidError for a rule that could never match or that has an invalid field."""
    operations = {int(each) for each in OPERATIONS.get(rule.resource, ())}  # type: ignore[call-overload]
    why = ""
    if not operations:
        why = f"ACLs do not support this kind of resource: resource={rule.resource}"
    elif rule.pattern not in (Pattern.LITERAL, Pattern.PREFIXED):
        why = f"the pattern must be literal or prefixed: pattern={rule.pattern}"
    elif not 0 < len(rule.name) <= RESOURCE_CHARS_MAX or not rule.name.isprintable():
        why = f"invalid resource name: name={rule.name[:300]!r}"
    elif rule.resource == Resource.CLUSTER and (rule.name != CLUSTER_NAME or rule.pattern != Pattern.LITERAL):
        why = f"a cluster rule must name the literal {CLUSTER_NAME}: name={rule.name!r}"
    elif not _is_principal(rule.principal):
        why = f"a principal must have the form User:NAME: principal={rule.principal[:300]!r}"
    elif not 0 < len(rule.host) <= NAME_CHARS_MAX or not rule.host.isprintable():
        why = f"a host must be an address or *: host={rule.host[:300]!r}"
    elif rule.operation not in operations | {int(_O.ALL)}:
        why = f"the operation does not exist for this kind of resource: operation={rule.operation}"
    elif rule.permission not in (Permission.ALLOW, Permission.DENY):
        why = f"a rule must allow or deny: permission={rule.permission}"
    if why:
        raise InvalidError(f"{why}.", fix="See docs/guides/security.md for the format of a rule.")


def _is_principal(text: str) -> bool:
    kind, _, name = text.partition(":")
    return kind == "User" and 0 < len(name) <= NAME_CHARS_MAX and name.isprintable()


class RuleFilter(msgspec.Struct, frozen=True):
    """Filter of rules. None and ANY match every value of a field. The pattern MATCH matches every rule that applies to
    a resource of this name: literal, prefixed or `*`."""

    resource: int = Resource.ANY
    pattern: int = Pattern.ANY
    name: str | None = None
    principal: str | None = None
    host: str | None = None
    operation: int = Operation.ANY
    permission: int = Permission.ANY

    def matches(self, rule: AclRule) -> bool:
        return (
            self.resource in (Resource.ANY, rule.resource)
            and self.principal in (None, rule.principal)
            and self.host in (None, rule.host)
            and self.operation in (Operation.ANY, rule.operation)
            and self.permission in (Permission.ANY, rule.permission)
            and self._matches_name(rule)
        )

    def _matches_name(self, rule: AclRule) -> bool:
        if self.pattern not in (Pattern.ANY, Pattern.MATCH, rule.pattern):
            return False
        if self.name is None or self.name == rule.name:
            return True
        if self.pattern != Pattern.MATCH:
            return False
        if rule.pattern == Pattern.PREFIXED:
            return self.name.startswith(rule.name)
        return rule.name == WILDCARD


class Authorizer:
    """Decide requests against one set of rules."""

    def __init__(self, rules: Iterable[AclRule] = (), super_users: Iterable[str] = ()) -> None:
        self._super_users = frozenset(super_users)
        self._literal: dict[tuple[int, str], list[AclRule]] = {}
        self._prefixed: dict[tuple[int, str], list[AclRule]] = {}
        lengths: dict[int, set[int]] = {}
        for rule in rules:
            by = self._prefixed if rule.pattern == Pattern.PREFIXED else self._literal
            by.setdefault((rule.resource, rule.name), []).append(rule)
            if rule.pattern == Pattern.PREFIXED:
                lengths.setdefault(rule.resource, set()).add(len(rule.name))
        self._lengths = {resource: sorted(found) for resource, found in lengths.items()}
        self._decided: dict[tuple[str, str, int, int, str], bool] = {}

    def allows(self, principal: str, host: str, operation: Operation, resource: Resource, name: str) -> bool:
        asked = (principal, host, int(operation), int(resource), name)
        known = self._decided.get(asked)
        if known is None:
            known = self._decide(principal, host, operation, resource, name)
            if len(name) <= RESOURCE_CHARS_MAX:
                if len(self._decided) >= DECISIONS_MAX:
                    self._decided.clear()
                self._decided[asked] = known
        return known

    def _decide(self, principal: str, host: str, operation: Operation, resource: Resource, name: str) -> bool:
        if principal in self._super_users:
            return True
        about = [rule for rule in self._rules_for(resource, name) if _applies_to(rule, principal, host)]
        if any(rule.permission == Permission.DENY and rule.operation in (operation, Operation.ALL) for rule in about):
            return False
        enough = _ALLOWED_BY.get(operation, (operation, Operation.ALL))
        return any(rule.permission == Permission.ALLOW and rule.operation in enough for rule in about)

    def _rules_for(self, resource: Resource, name: str) -> Iterable[AclRule]:
        yield from self._literal.get((resource, name), ())
        if name != WILDCARD:
            yield from self._literal.get((resource, WILDCARD), ())
        for length in self._lengths.get(resource, ()):
            if length > len(name):
                break
            yield from self._prefixed.get((resource, name[:length]), ())

    def allows_on_any(self, principal: str, host: str, operation: Operation, resource: Resource) -> bool:
        """Return whether the operation is allowed on any resource of this kind (KIP-679). An allowing rule does not
        count if a denying rule covers everything that it names."""
        if principal in self._super_users:
            return True
        mine = [
            rule
            for by in (self._literal, self._prefixed)
            for (kind, _), rules in by.items()
            if kind == resource
            for rule in rules
            if _applies_to(rule, principal, host)
        ]
        denied = [r for r in mine if r.permission == Permission.DENY and r.operation in (operation, Operation.ALL)]
        enough = _ALLOWED_BY.get(operation, (operation, Operation.ALL))
        return any(
            rule.permission == Permission.ALLOW
            and rule.operation in enough
            and not any(_covers(denial, rule) for denial in denied)
            for rule in mine
        )

    def allowed_operations(self, principal: str, host: str, resource: Resource, name: str) -> int:
        """Return the allowed operations as a bit field (KIP-430)."""
        allowed: Sequence[Operation] = [
            each for each in OPERATIONS[resource] if self.allows(principal, host, each, resource, name)
        ]
        return operation_bits(allowed)


def operation_bits(operations: Iterable[Operation]) -> int:
    return sum(1 << each for each in operations)


def _applies_to(rule: AclRule, principal: str, host: str) -> bool:
    return rule.principal in (principal, ANY_PRINCIPAL) and canonical_host(rule.host) in (host, WILDCARD)


def _covers(denial: AclRule, rule: AclRule) -> bool:
    """Return whether `denial` applies to every resource that `rule` names."""
    if denial.pattern == Pattern.PREFIXED:
        return rule.name.startswith(denial.name) and not (rule.pattern == Pattern.LITERAL and rule.name == WILDCARD)
    if denial.name == WILDCARD:
        return True
    return rule.pattern == Pattern.LITERAL and rule.name == denial.name
