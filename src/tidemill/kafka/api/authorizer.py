"""Authorization of requests: the operations that a connection's principal may perform, checked once per request.

`checked` runs before every handler on decoded bodies. Produce and Fetch, which have codecs of their own, call
`context.access` when they resolve a topic. `required_operations.CHECKS` has the operations that each API requires; an
API that is missing there is allowed to super users only.

Invariant: if a request names several resources, the allowed ones are processed and the others are answered with their
code. The answer does not reveal whether the latter exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tidemill.kafka import error_codes
from tidemill.kafka.net.listener_security import ClientIdentity
from tidemill.metastore.rows.catalogue import TopicRow
from tidemill.security.acl_cache import AclCache
from tidemill.security.acls import OPERATIONS, Operation, Resource, operation_bits
from tidemill.security.audit import Audit

if TYPE_CHECKING:
    from tidemill.kafka.api.context import Context
    from tidemill.kafka.api.dispatch import Request

Body = dict[str, Any]
RowOrCode = TypeVar("RowOrCode", TopicRow | int, TopicRow | int | None)
"""Result type of `TopicCache.resolve` or `find`."""

DENIED: Final = {
    Resource.TOPIC: error_codes.TOPIC_AUTHORIZATION_FAILED,
    Resource.GROUP: error_codes.GROUP_AUTHORIZATION_FAILED,
    Resource.CLUSTER: error_codes.CLUSTER_AUTHORIZATION_FAILED,
    Resource.TRANSACTIONAL_ID: error_codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}


class RequestAuthorizer:
    """Access rules as requests use them. `rulebook` None means that every client may do everything."""

    def __init__(self, rulebook: AclCache | None, audit: Audit) -> None:
        self._rulebook = rulebook
        self._audit = audit

    @property
    def rulebook(self) -> AclCache | None:
        return self._rulebook

    @property
    def rules(self) -> object:
        """Object whose identity changes whenever the answers may change."""
        return self._rulebook.authorizer if self._rulebook is not None else None

    @property
    def is_enforced(self) -> bool:
        return self._rulebook is not None

    def is_allowed(self, visitor: ClientIdentity, operation: Operation, resource: Resource, name: str) -> bool:
        """Return whether the operation is allowed. A denial is written to the audit log."""
        if self.is_visible(visitor, operation, resource, name):
            return True
        self._audit.log_refusal(
            "kafka.operation_denied",
            (visitor.principal, operation.name, resource.name, name),
            principal=visitor.principal,
            host=visitor.host,
            operation=operation.name,
            resource=resource.name,
            name=name,
        )
        return False

    def is_visible(self, visitor: ClientIdentity, operation: Operation, resource: Resource, name: str) -> bool:
        """Return whether the operation is allowed, without an audit entry: for items that are left out of an answer
        silently.
        """
        rulebook = self._rulebook
        return rulebook is None or rulebook.authorizer.allows(
            visitor.principal, visitor.host, operation, resource, name
        )

    def is_allowed_on_any(self, visitor: ClientIdentity, operation: Operation, resource: Resource) -> bool:
        rulebook = self._rulebook
        return rulebook is None or rulebook.authorizer.allows_on_any(
            visitor.principal, visitor.host, operation, resource
        )

    def topic(
        self, visitor: ClientIdentity, operation: Operation, asked: str, row: RowOrCode, *, is_id: bool
    ) -> RowOrCode | int:
        """Return `row`, or TOPIC_AUTHORIZATION_FAILED. A denied name does not reveal whether the topic exists."""
        name = asked if not is_id else row.name if isinstance(row, TopicRow) else None
        if name is None or self.is_allowed(visitor, operation, Resource.TOPIC, name):
            return row
        return error_codes.TOPIC_AUTHORIZATION_FAILED

    def allowed_operations(self, visitor: ClientIdentity, resource: Resource, name: str) -> int:
        """Return the allowed operations as bits (KIP-430)."""
        if self._rulebook is None:
            return operation_bits(OPERATIONS[resource])
        return self._rulebook.authorizer.allowed_operations(visitor.principal, visitor.host, resource, name)


class CheckedRequest(NamedTuple):
    """Request that is being checked."""

    context: Context
    request: Request

    def is_allowed(self, operation: Operation, resource: Resource, name: str) -> bool:
        return self.context.access.is_allowed(self.request.visitor, operation, resource, name)

    def is_visible(self, operation: Operation, resource: Resource, name: str) -> bool:
        return self.context.access.is_visible(self.request.visitor, operation, resource, name)


class Verdict(NamedTuple):
    """Result of a check.

    `allowed` is the body for the handler, or None. `denied` has the denied bodies, each with its code.

    `lists` are the fields of the answer that are concatenated. `after` is called with the answer and changes it.
    """

    allowed: Body | None
    denied: tuple[tuple[Body, int], ...] = ()
    lists: tuple[str, ...] = ()
    after: Callable[[CheckedRequest, Body, Body], None] | None = None


Check = Callable[[CheckedRequest, Body], Verdict]
