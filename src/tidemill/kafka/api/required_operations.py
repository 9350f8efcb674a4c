"""Operations that each API requires: one entry per API (`CHECKS`).

The operations are those of Kafka's protocol guide ("Operations and Resources on Protocols"). A check splits a request's
body: the allowed part goes to the handler, the denied part is answered by the handler's own `failed` with the code of
its resource. An API that is not listed requires CLUSTER_ACTION on the cluster, which no principal has by default.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from tidemill.kafka import error_codes
from tidemill.kafka.api.authorizer import DENIED, Body, Check, CheckedRequest, Verdict
from tidemill.kafka.schema.primitives import ZERO_UUID
from tidemill.security.acls import CLUSTER_NAME, Operation, Resource

if TYPE_CHECKING:
    from tidemill.kafka.api.context import Context
    from tidemill.kafka.api.dispatch import Request

_O, _R = Operation, Resource
LARGE_REQUEST_BYTES: Final = 4_096
LARGE_ANSWER_LIST: Final = 1_000
"""Sizes from which a request or an answer is checked in a thread: a name takes a microsecond or two, and the loop
serves other requests.
"""

ErrorAnswer = Callable[[Body, int], Body]
NameOf = Callable[[CheckedRequest, object], str | None]
"""Function that returns the name of a listed item, or None for an unknown id, which the handler reports."""


async def authorize_and_handle(
    context: Context, request: Request, body: Body, handle: Callable[[Body], Awaitable[Body]], failed: ErrorAnswer
) -> Body:
    """Return the answer to `body`: the answer of `handle` for the allowed part and of `failed` for the rest."""
    asking = CheckedRequest(context, request)
    after: list[Callable[[CheckedRequest, Body, Body], None]] = []
    denied: list[tuple[Body, tuple[str, ...]]] = []
    steps = CHECKS.get(request.key, (_check_cluster(_O.CLUSTER_ACTION),)) if context.access.is_enforced else ()
    large = len(request.view) > LARGE_REQUEST_BYTES
    for step in steps:
        verdict = await asyncio.to_thread(step, asking, body) if large else step(asking, body)
        denied += [(failed(refused, code), verdict.lists) for refused, code in verdict.denied]
        if verdict.allowed is None:
            return denied[-1][0]
        body = verdict.allowed
        after += [verdict.after] if verdict.after is not None else []
    answer = await handle(body)
    for refused, lists in denied:
        answer = answer | {name: [*answer[name], *refused[name]] for name in lists}
    after += [_OPERATIONS[request.key]] if request.key in _OPERATIONS else []
    large = any(len(each) > LARGE_ANSWER_LIST for each in answer.values() if isinstance(each, list))
    for change in after:
        if large:
            await asyncio.to_thread(change, asking, body, answer)
        else:
            change(asking, body, answer)
    return answer


# kinds of checks ---------------------------------------------------------------------------------------------


def _check_cluster(operation: Operation) -> Check:
    return _check_one(_R.CLUSTER, operation, lambda _: CLUSTER_NAME)


def _check_one(resource: Resource, operation: Operation, name: Callable[[Body], str]) -> Check:
    """Return a check of one resource on which the whole request depends."""

    def check(asking: CheckedRequest, body: Body) -> Verdict:
        if asking.is_allowed(operation, resource, name(body)):
            return Verdict(body)
        return Verdict(None, ((body, DENIED[resource]),))

    return check


def _topic_name(asking: CheckedRequest, item: object) -> str | None:
    """Return the name of a topic item: its name, or the name of its id."""
    if isinstance(item, str):
        return item
    assert isinstance(item, dict)
    name = item.get("name") or item.get("topic")
    if name or item.get("topic_id", ZERO_UUID) == ZERO_UUID:
        return str(name or "")
    row = asking.context.cache.by_id(item["topic_id"])
    return None if row is None else row.name


def _check_each(
    resource: Resource, operation: Operation, asked: str, answered: str = "", *, name: NameOf = _topic_name
) -> Check:
    """Return a check of a list of independent items.

    `answered` is the name of the list in the answer, if it differs.
    """

    def check(asking: CheckedRequest, body: Body) -> Verdict:
        items = body.get(asked)
        if not items:
            return Verdict(body)
        allowed: list[object] = []
        denied: list[object] = []
        for item in items:
            named = name(asking, item)
            may = named is None or asking.is_allowed(operation, resource, named)
            (allowed if may else denied).append(item)
        if not denied:
            return Verdict(body)
        refused = ((body | {asked: denied}, DENIED[resource]),)
        return Verdict(body | {asked: allowed}, refused, (answered or asked,))

    return check


def _check_all(resource: Resource, operation: Operation, asked: str) -> Check:
    """Return a check of a list that is allowed as a whole or not at all, such as the partitions of a transaction."""

    def check(asking: CheckedRequest, body: Body) -> Verdict:
        names = [_topic_name(asking, item) for item in body.get(asked) or ()]
        if all([asking.is_allowed(operation, resource, name) for name in names if name is not None]):
            return Verdict(body)
        return Verdict(None, ((body, DENIED[resource]),))

    return check


def _filter_answer(resource: Resource, operation: Operation, answered: str, field: str) -> Check:
    """Return a check for an answer that lists everything: items that the client may not see are removed from it."""

    def remove_invisible(asking: CheckedRequest, body: Body, answer: Body) -> None:
        answer[answered] = [each for each in answer[answered] if asking.is_visible(operation, resource, each[field])]

    return lambda _, body: Verdict(body, after=remove_invisible)


# checks of single APIs ---------------------------------------------------------------------------------------


def _check_metadata(asking: CheckedRequest, body: Body) -> Verdict:
    """Check a Metadata request.

    Named topics need DESCRIBE; of all topics the visible ones are listed; topics to be created need CREATE, as in
    `is_creation_allowed`.
    """
    asked = body["topics"]
    if asked is None or (asking.request.version == 0 and not asked):
        return _filter_answer(_R.TOPIC, _O.DESCRIBE, "topics", "name")(asking, body)
    verdict = _check_each(_R.TOPIC, _O.DESCRIBE, "topics")(asking, body)._replace(after=_hide_late_topics)
    if not verdict.denied or asking.request.version > 0:
        return verdict
    assert verdict.allowed is not None
    # An empty list requests all topics in version 0.
    return verdict if verdict.allowed["topics"] else Verdict(None, verdict.denied)


def _hide_late_topics(asking: CheckedRequest, body: Body, answer: Body) -> None:
    """Hide topics requested by an id that this node learnt while it answered."""
    for topic in answer["topics"]:
        if topic["name"] and not topic["error_code"] and not asking.is_visible(_O.DESCRIBE, _R.TOPIC, topic["name"]):
            topic |= {"name": None, "partitions": [], "error_code": error_codes.TOPIC_AUTHORIZATION_FAILED}


def is_creation_allowed(context: Context, request: Request, topic: str) -> bool:
    """Return whether the client may create a topic, by CreateTopics or Metadata: CREATE of the cluster, or of the
    topic.
    """
    access, visitor = context.access, request.visitor
    if access.is_visible(visitor, _O.CREATE, _R.CLUSTER, CLUSTER_NAME):
        return True
    return access.is_allowed(visitor, _O.CREATE, _R.TOPIC, topic)


def _check_create_topics(asking: CheckedRequest, body: Body) -> Verdict:
    denied = [
        topic for topic in body["topics"] if not is_creation_allowed(asking.context, asking.request, topic["name"])
    ]
    if not denied:
        return Verdict(body)
    allowed = [topic for topic in body["topics"] if topic not in denied]
    refused = ((body | {"topics": denied}, error_codes.TOPIC_AUTHORIZATION_FAILED),)
    return Verdict(body | {"topics": allowed}, refused, ("topics",))


def _check_offset_fetch(asking: CheckedRequest, body: Body) -> Verdict:
    """Check an OffsetFetch request: DESCRIBE of each group and of the named topics; of all topics the visible ones are
    listed.
    """
    groups = body["groups"] if asking.request.version >= 8 else [body]
    allowed: list[Body] = []
    denied: list[Body] = []
    for group in groups:
        (allowed if asking.is_allowed(_O.DESCRIBE, _R.GROUP, group["group_id"] or "") else denied).append(group)
    if asking.request.version < 8:
        if denied:
            return Verdict(None, ((body, error_codes.GROUP_AUTHORIZATION_FAILED),))
        return Verdict(body, after=_hide_offsets)
    refused = ((body | {"groups": denied}, error_codes.GROUP_AUTHORIZATION_FAILED),) if denied else ()
    return Verdict(body | {"groups": allowed}, refused, ("groups",), after=_hide_offsets)


def _hide_offsets(asking: CheckedRequest, body: Body, answer: Body) -> None:
    """Hide the offsets of topics that the client may not describe: denied if named, left out if all were requested."""
    several = asking.request.version >= 8
    named = {group["group_id"]: group["topics"] is not None for group in (body["groups"] if several else [body])}
    for group in answer["groups"] if several else [answer]:
        kept = []
        for topic in group["topics"]:
            name = _topic_name(asking, topic)
            if name is None or asking.is_visible(_O.DESCRIBE, _R.TOPIC, name):
                kept.append(topic)
            elif named.get(group.get("group_id"), named.get(body.get("group_id"), True)):
                kept.append(topic | {"partitions": [_denied_offset(each) for each in topic["partitions"]]})
        group["topics"] = kept


def _denied_offset(partition: Body) -> Body:
    nothing = {"committed_offset": -1, "committed_leader_epoch": -1, "metadata": ""}
    return partition | nothing | {"error_code": error_codes.TOPIC_AUTHORIZATION_FAILED}


def _check_find_coordinator(asking: CheckedRequest, body: Body) -> Verdict:
    """Check DESCRIBE of the group or transactional id; the handler rejects unknown key types."""
    resource = {0: _R.GROUP, 1: _R.TRANSACTIONAL_ID}.get(body.get("key_type", 0))
    if resource is None:
        return Verdict(body)
    if asking.request.version <= 3:
        return _check_one(resource, _O.DESCRIBE, lambda body: body["key"] or "")(asking, body)
    return _check_each(resource, _O.DESCRIBE, "coordinator_keys", "coordinators")(asking, body)


def _check_init_producer_id(asking: CheckedRequest, body: Body) -> Verdict:
    """Check WRITE of the transactional id; without one, IDEMPOTENT_WRITE of the cluster or WRITE of any topic
    (KIP-679).
    """
    if body["transactional_id"] is not None:
        return _WRITE_TRANSACTION(asking, body)
    if asking.context.access.is_allowed_on_any(asking.request.visitor, _O.WRITE, _R.TOPIC):
        return Verdict(body)
    return _check_cluster(_O.IDEMPOTENT_WRITE)(asking, body)


def _check_add_partitions(asking: CheckedRequest, body: Body) -> Verdict:
    """Check an AddPartitionsToTxn request. Version 4 and later are requests of brokers, for several transactions."""
    if asking.request.version >= 4:
        return _check_cluster(_O.CLUSTER_ACTION)(asking, body)
    return _check_one(_R.TRANSACTIONAL_ID, _O.WRITE, lambda body: body["v3_and_below_transactional_id"] or "")(
        asking, body
    )


def _check_configs(operation: Operation, answered: str) -> Check:
    """Return a check of configs of topics, brokers (of the cluster) and groups, each independently."""
    kinds = {2: _R.TOPIC, 4: _R.CLUSTER, 8: _R.CLUSTER, 32: _R.GROUP}

    def check(asking: CheckedRequest, body: Body) -> Verdict:
        allowed: list[Body] = []
        denied: dict[Resource, list[Body]] = {}
        for item in body["resources"]:
            resource = kinds.get(item["resource_type"], _R.CLUSTER)
            name = CLUSTER_NAME if resource is _R.CLUSTER else item["resource_name"]
            may = asking.is_allowed(operation, resource, name)
            (allowed if may else denied.setdefault(resource, [])).append(item)
        refused = tuple((body | {"resources": items}, DENIED[resource]) for resource, items in denied.items())
        return Verdict(body | {"resources": allowed}, refused, (answered,))

    return check


def _check_list_groups(asking: CheckedRequest, body: Body) -> Verdict:
    if asking.is_visible(_O.DESCRIBE, _R.CLUSTER, CLUSTER_NAME):
        return Verdict(body)
    return _filter_answer(_R.GROUP, _O.DESCRIBE, "groups", "group_id")(asking, body)


def _check_offset_delete(asking: CheckedRequest, body: Body) -> Verdict:
    """Deny topics that may not be read; their answers are added to those of the allowed topics."""
    denied = [topic for topic in body["topics"] if not asking.is_allowed(_O.READ, _R.TOPIC, topic["name"])]

    def refuse(asking: CheckedRequest, body: Body, answer: Body) -> None:
        code = error_codes.TOPIC_AUTHORIZATION_FAILED
        answer["topics"] = [
            *answer["topics"],
            *({"name": t["name"], "partitions": _partition_codes(t, code)} for t in denied),
        ]

    return Verdict(body | {"topics": [topic for topic in body["topics"] if topic not in denied]}, after=refuse)


def _partition_codes(topic: Body, code: int) -> list[Body]:
    return [{"partition_index": each["partition_index"], "error_code": code} for each in topic["partitions"]]


def _hide_groups(asking: CheckedRequest, body: Body, answer: Body) -> None:
    """Hide groups whose members are subscribed to topics that the client may not describe."""

    def names(group: Body) -> set[str]:
        found = {name for member in group["members"] for name in member["subscribed_topic_names"]}
        for kind in ("assignment", "target_assignment"):
            found |= {t["topic_name"] for member in group["members"] for t in member[kind]["topic_partitions"]}
        return found

    for group in answer["groups"]:
        if not all(asking.is_visible(_O.DESCRIBE, _R.TOPIC, name) for name in names(group)):
            group |= {"error_code": error_codes.TOPIC_AUTHORIZATION_FAILED, "group_state": "", "members": []}


def _hide_transaction_topics(asking: CheckedRequest, body: Body, answer: Body) -> None:
    """Remove the topics of transactions that the client may not describe."""
    for state in answer["transaction_states"]:
        state["topics"] = [each for each in state["topics"] if asking.is_visible(_O.DESCRIBE, _R.TOPIC, each["topic"])]


def _check_topic_partitions(asking: CheckedRequest, body: Body) -> Verdict:
    """Check DESCRIBE of the named topics; of all topics the handler lists the visible ones, because it pages them."""
    if not body["topics"]:
        return Verdict(body)
    verdict = _check_each(_R.TOPIC, _O.DESCRIBE, "topics")(asking, body)
    assert verdict.allowed is not None
    # An empty list requests all topics.
    return verdict if verdict.allowed["topics"] else Verdict(None, verdict.denied)


# authorized operations (KIP-430) -----------------------------------------------------------------------------


def _fill_operations(resource: Resource, flag: str, answered: str, field: str, into: str) -> Callable[..., None]:
    def fill(asking: CheckedRequest, body: Body, answer: Body) -> None:
        if not body.get(flag):
            return  # the writer's default means "not requested"
        for each in answer[answered]:
            if not each["error_code"] and each.get(field):
                each[into] = asking.context.access.allowed_operations(asking.request.visitor, resource, each[field])

    return fill


def _fill_cluster_operations(flag: str) -> Callable[..., None]:
    def fill(asking: CheckedRequest, body: Body, answer: Body) -> None:
        if body.get(flag):
            access, visitor = asking.context.access, asking.request.visitor
            answer["cluster_authorized_operations"] = access.allowed_operations(visitor, _R.CLUSTER, CLUSTER_NAME)

    return fill


def _fill_metadata_operations(asking: CheckedRequest, body: Body, answer: Body) -> None:
    _fill_cluster_operations("include_cluster_authorized_operations")(asking, body, answer)
    flag, into = "include_topic_authorized_operations", "topic_authorized_operations"
    _fill_operations(_R.TOPIC, flag, "topics", "name", into)(asking, body, answer)


_OPERATIONS: Final = {
    3: _fill_metadata_operations,
    15: _fill_operations(_R.GROUP, "include_authorized_operations", "groups", "group_id", "authorized_operations"),
    60: _fill_cluster_operations("include_cluster_authorized_operations"),
    69: _fill_operations(_R.GROUP, "include_authorized_operations", "groups", "group_id", "authorized_operations"),
}
"""APIs whose answer includes the authorized operations on request."""

# the table ---------------------------------------------------------------------------------------------------

NO_CHECK: Final[Sequence[Check]] = ()
"""No check: every authenticated client may call these APIs."""
CHECKED_IN_HANDLER: Final[Sequence[Check]] = ()
"""Check in the handler, whose own codec decodes the topics."""

_READ_GROUP: Final = _check_one(_R.GROUP, _O.READ, lambda body: body["group_id"] or "")
_WRITE_TRANSACTION: Final = _check_one(_R.TRANSACTIONAL_ID, _O.WRITE, lambda body: body["transactional_id"] or "")

CHECKS: Final[dict[int, Sequence[Check]]] = {
    0: CHECKED_IN_HANDLER,  # Produce: WRITE of each topic, and of the transactional id
    1: CHECKED_IN_HANDLER,  # Fetch: READ of each topic
    2: (_check_each(_R.TOPIC, _O.DESCRIBE, "topics"),),
    3: (_check_metadata,),
    8: (_READ_GROUP, _check_each(_R.TOPIC, _O.READ, "topics")),
    9: (_check_offset_fetch,),
    10: (_check_find_coordinator,),
    11: (_READ_GROUP,),
    12: (_READ_GROUP,),
    13: (_READ_GROUP,),
    14: (_READ_GROUP,),
    15: (_check_each(_R.GROUP, _O.DESCRIBE, "groups"),),
    16: (_check_list_groups,),
    17: NO_CHECK,
    18: NO_CHECK,
    19: (_check_create_topics,),
    20: (
        _check_each(_R.TOPIC, _O.DELETE, "topics", "responses"),
        _check_each(_R.TOPIC, _O.DELETE, "topic_names", "responses"),
    ),
    21: (_check_each(_R.TOPIC, _O.DELETE, "topics"),),
    22: (_check_init_producer_id,),
    23: (_check_each(_R.TOPIC, _O.DESCRIBE, "topics"),),
    24: (_check_add_partitions, _check_all(_R.TOPIC, _O.WRITE, "v3_and_below_topics")),
    25: (_WRITE_TRANSACTION, _READ_GROUP),
    26: (_WRITE_TRANSACTION,),
    27: (_check_cluster(_O.CLUSTER_ACTION),),
    28: (_WRITE_TRANSACTION, _READ_GROUP, _check_each(_R.TOPIC, _O.READ, "topics")),
    29: (_check_cluster(_O.DESCRIBE),),
    30: (_check_cluster(_O.ALTER),),
    31: (_check_cluster(_O.ALTER),),
    32: (_check_configs(_O.DESCRIBE_CONFIGS, "results"),),
    33: (_check_configs(_O.ALTER_CONFIGS, "responses"),),
    34: (_check_cluster(_O.ALTER),),
    35: (_check_cluster(_O.DESCRIBE),),
    36: NO_CHECK,
    37: (_check_each(_R.TOPIC, _O.ALTER, "topics", "results"),),
    42: (_check_each(_R.GROUP, _O.DELETE, "groups_names", "results"),),
    43: (_check_cluster(_O.ALTER),),
    44: (_check_configs(_O.ALTER_CONFIGS, "responses"),),
    45: (_check_cluster(_O.ALTER),),
    46: (_check_cluster(_O.DESCRIBE),),
    47: (_check_one(_R.GROUP, _O.DELETE, lambda body: body["group_id"] or ""), _check_offset_delete),
    48: (_check_cluster(_O.DESCRIBE_CONFIGS),),
    49: (_check_cluster(_O.ALTER_CONFIGS),),
    50: (_check_cluster(_O.DESCRIBE),),
    51: (_check_cluster(_O.ALTER),),
    60: NO_CHECK,
    61: (_check_each(_R.TOPIC, _O.READ, "topics"),),
    65: (
        _check_each(_R.TRANSACTIONAL_ID, _O.DESCRIBE, "transactional_ids", "transaction_states"),
        lambda _, body: Verdict(body, after=_hide_transaction_topics),
    ),
    66: (_filter_answer(_R.TRANSACTIONAL_ID, _O.DESCRIBE, "transaction_states", "transactional_id"),),
    68: (_READ_GROUP, _check_all(_R.TOPIC, _O.DESCRIBE, "subscribed_topic_names")),
    69: (
        _check_each(_R.GROUP, _O.DESCRIBE, "group_ids", "groups"),
        lambda _, body: Verdict(body, after=_hide_groups),
    ),
    74: (_check_cluster(_O.DESCRIBE_CONFIGS),),
    75: (_check_topic_partitions,),
}
