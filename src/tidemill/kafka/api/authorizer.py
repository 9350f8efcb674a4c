"""Authorization of requests: what a connection's principal may do, asked in one place a request.

AC1  `checked` stands before every handler on decoded bodies; Produce and Fetch, which have codecs of their own, ask
     `context.access` where they resolve a topic. Which operation an API asks for is in `required_operations.CHECKS`;
     one that is missing there is refused to everybody but super users.
AC2  Of a request that names several things those that are allowed are worked on, the others answered with their
     code: nobody learns from it whether they exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tidemill.kafka import error_codes
from tidemill.kafka.net.listener_security import ClientIdentity
from tidemill.metastore.rows.topics import TopicRow
from tidemill.security.acl_cache import AclCache
from tidemill.security.acls import OPERATIONS, Operation, Resource, bits
from tidemill.security.audit import Audit

if TYPE_CHECKING:
    from tidemill.kafka.api.context import Context
    from tidemill.kafka.api.dispatch import Request

Body = dict[str, Any]
RowOrCode = TypeVar("RowOrCode", TopicRow | int, TopicRow | int | None)
"""As `TopicCache.resolve` and `find` give it."""

DENIED: Final = {
    Resource.TOPIC: error_codes.TOPIC_AUTHORIZATION_FAILED,
    Resource.GROUP: error_codes.GROUP_AUTHORIZATION_FAILED,
    Resource.CLUSTER: error_codes.CLUSTER_AUTHORIZATION_FAILED,
    Resource.TRANSACTIONAL_ID: error_codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}


class Access:
    """`rulebook` None = everybody may do everything."""

    def __init__(self, rulebook: AclCache | None, audit: Audit) -> None:
        self._rulebook = rulebook
        self._audit = audit

    @property
    def rulebook(self) -> AclCache | None:
        return self._rulebook

    @property
    def rules(self) -> object:
        """Another object whenever another answer may be given."""
        return self._rulebook.authorizer if self._rulebook is not None else None

    @property
    def asks(self) -> bool:
        return self._rulebook is not None

    def may(self, visitor: ClientIdentity, operation: Operation, resource: Resource, name: str) -> bool:
        """A refusal is told."""
        if self.sees(visitor, operation, resource, name):
            return True
        self._audit.refused(
            "kafka.operation_denied",
            (visitor.principal, operation.name, resource.name, name),
            principal=visitor.principal,
            host=visitor.host,
            operation=operation.name,
            resource=resource.name,
            name=name,
        )
        return False

    def sees(self, visitor: ClientIdentity, operation: Operation, resource: Resource, name: str) -> bool:
        """As `may`, for what is left out of an answer without a word."""
        rulebook = self._rulebook
        return rulebook is None or rulebook.authorizer.allows(
            visitor.principal, visitor.host, operation, resource, name
        )

    def may_some(self, visitor: ClientIdentity, operation: Operation, resource: Resource) -> bool:
        rulebook = self._rulebook
        return rulebook is None or rulebook.authorizer.allows_some(visitor.principal, visitor.host, operation, resource)

    def topic(
        self, visitor: ClientIdentity, operation: Operation, asked: str, row: RowOrCode, *, is_id: bool
    ) -> RowOrCode | int:
        """`row`, or TOPIC_AUTHORIZATION_FAILED; of a name that is refused nobody learns whether it exists."""
        name = asked if not is_id else row.name if isinstance(row, TopicRow) else None
        if name is None or self.may(visitor, operation, Resource.TOPIC, name):
            return row
        return error_codes.TOPIC_AUTHORIZATION_FAILED

    def operations(self, visitor: ClientIdentity, resource: Resource, name: str) -> int:
        """KIP-430: bits of what is allowed."""
        if self._rulebook is None:
            return bits(OPERATIONS[resource])
        return self._rulebook.authorizer.operations(visitor.principal, visitor.host, resource, name)


class Asking(NamedTuple):
    """One request that is being checked."""

    context: Context
    request: Request

    def may(self, operation: Operation, resource: Resource, name: str) -> bool:
        return self.context.access.may(self.request.visitor, operation, resource, name)

    def sees(self, operation: Operation, resource: Resource, name: str) -> bool:
        return self.context.access.sees(self.request.visitor, operation, resource, name)


class Verdict(NamedTuple):
    """`allowed`: the body that is worked on, or None. `denied`: bodies of what is refused, each with its code.

    `lists`: the fields of the answer that are put together. `after`: called with the answer, changes it.
    """

    allowed: Body | None
    denied: tuple[tuple[Body, int], ...] = ()
    lists: tuple[str, ...] = ()
    after: Callable[[Asking, Body, Body], None] | None = None


Check = Callable[[Asking, Body], Verdict]
