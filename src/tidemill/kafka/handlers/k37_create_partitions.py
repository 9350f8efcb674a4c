"""Handler of CreatePartitions (37), versions 0 to 3.

It writes the topic's row with its new count, which every node sees within a moment (`topic_cache`, `topics.log`,
`node.binder`). Existing records are not moved, as in Kafka. The partition count of a captured table's topic is fixed
(INVALID_PARTITIONS), because the writer's mapping of keys to partitions preserves the order of each key. A manual
assignment is checked by Kafka's rules, here and in CreateTopics, but has no effect: a partition has one leader, which
its lease names, and the bucket replicates the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tidemill.base.errors import InvalidError, MissingError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Broker, Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded, run_with_timeout
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.metastore.catalogue import TopicRow, with_partitions


class InvalidReplicaAssignmentError(InvalidError):
    """Error with the code INVALID_REPLICA_ASSIGNMENT."""


def check_assignments(lists: Sequence[Sequence[int]], count: int, brokers: Sequence[Broker]) -> None:
    """Check `lists`, the broker ids of each of `count` partitions. Raises InvalidReplicaAssignmentError."""
    if len(lists) != count:
        raise InvalidReplicaAssignmentError(
            f"every new partition needs an assignment: partitions={count} assignments={len(lists)}."
        )
    known = {broker.node_id for broker in brokers}
    for ids in lists:
        if not ids:
            raise InvalidReplicaAssignmentError("an assignment names no broker.")
        if len(set(ids)) != len(ids):
            raise InvalidReplicaAssignmentError(f"an assignment names a broker twice: brokers={list(ids)}.")
        if len(ids) != len(lists[0]):
            raise InvalidReplicaAssignmentError(
                f"the assignments have different replication factors: brokers={list(ids)}."
            )
        if unknown := sorted(set(ids) - known):
            raise InvalidReplicaAssignmentError(
                f"an assignment names unknown brokers: brokers={unknown}.", fix=f"Use brokers of {sorted(known)}."
            )


async def handle(context: Context, request: Request, body: Body) -> Body:
    named = Counter(topic["name"] for topic in body["topics"])
    results = []
    for topic in body["topics"]:
        if named[topic["name"]] > 1:
            results.append(_result(topic["name"], error_codes.INVALID_REQUEST, "The request names the topic twice."))
        else:
            work = _create_partitions(context, topic, validate_only=body["validate_only"])
            code, message = await run_with_timeout(body["timeout"], work, late=LATE)
            results.append(_result(topic["name"], code, message))
    return {"results": results}


LATE = (error_codes.REQUEST_TIMED_OUT, "The partitions may still be created: check again.")


async def _create_partitions(context: Context, topic: Body, *, validate_only: bool) -> tuple[int, str | None]:
    name, count = topic["name"], topic["count"]
    try:
        row = await context.catalogue.get(TopicRow, name)
        if row is None:
            return error_codes.UNKNOWN_TOPIC_OR_PARTITION, "No such topic."
        context.cache.add(row)
        with_partitions(row, count)
        if topic["assignments"] is not None:
            lists = [each["broker_ids"] for each in topic["assignments"]]
            check_assignments(lists, count - row.partitions, context.brokers())
        limit = context.settings.section.partitions_max
        if context.cache.partitions - row.partitions + count > limit:
            return error_codes.POLICY_VIOLATION, f"Too many partitions in the cluster: kafka.partitions_max={limit}."
        if not validate_only:
            context.cache.add(await context.catalogue.grow_topic(name, count))
    except InvalidReplicaAssignmentError as error:
        return error_codes.INVALID_REPLICA_ASSIGNMENT, str(error)
    except InvalidError as error:
        return error_codes.INVALID_PARTITIONS, str(error)
    except MissingError:
        return error_codes.UNKNOWN_TOPIC_OR_PARTITION, "No such topic."
    except TidemillError as error:
        return error_codes.REQUEST_TIMED_OUT, str(error)
    return error_codes.NONE, None


def _result(name: str, code: int, message: str | None) -> Body:
    return {"name": name, "error_code": code, "error_message": message}


def error_answer(body: Body, code: int) -> Body:
    return {"results": [_result(topic["name"], code, None) for topic in body["topics"]]}


API = Api(37, "create_partitions", 0, 3, begin_decoded(handle, error_answer), barrier=True)
