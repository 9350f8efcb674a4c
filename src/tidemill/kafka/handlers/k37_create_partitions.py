"""CreatePartitions (37), versions 0 to 3.

Writes the topic's row with its new count; every node sees it within a moment (`topic_cache`, `topics.log`,
`node.binder`). The records there are stay where they are, as in Kafka. A captured table's topic keeps its partitions
(INVALID_PARTITIONS): its writer's rule of keys to partitions is what orders a key. A manual assignment is checked as
Kafka checks it and decides nothing: which node leads is the lease's to say.
"""

from __future__ import annotations

from collections import Counter

from tidemill.base.errors import InvalidError, MissingError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, cold, within
from tidemill.kafka.api.replica_assignments import InvalidReplicaAssignmentError, check_assignments
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.metastore.catalogue import TopicRow, grown


async def handle(context: Context, request: Request, body: Body) -> Body:
    named = Counter(topic["name"] for topic in body["topics"])
    results = []
    for topic in body["topics"]:
        if named[topic["name"]] > 1:
            results.append(_result(topic["name"], error_codes.INVALID_REQUEST, "The request names this topic twice."))
        else:
            work = _grow(context, topic, validate_only=body["validate_only"])
            code, message = await within(body["timeout"], work, late=LATE)
            results.append(_result(topic["name"], code, message))
    return {"results": results}


LATE = (error_codes.REQUEST_TIMED_OUT, "The topic may grow yet: look at it again.")


async def _grow(context: Context, topic: Body, *, validate_only: bool) -> tuple[int, str | None]:
    name, count = topic["name"], topic["count"]
    try:
        row = await context.catalogue.get(TopicRow, name)
        if row is None:
            return error_codes.UNKNOWN_TOPIC_OR_PARTITION, "No such topic."
        context.cache.learn(row)
        grown(row, count)
        if topic["assignments"] is not None:
            lists = [each["broker_ids"] for each in topic["assignments"]]
            check_assignments(lists, count - row.partitions, context.brokers())
        limit = context.settings.partitions_max
        if context.cache.partitions - row.partitions + count > limit:
            return error_codes.POLICY_VIOLATION, f"Too many partitions in all: kafka.partitions_max={limit}."
        if not validate_only:
            context.cache.learn(await context.catalogue.grow_topic(name, count))
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


def failed(body: Body, code: int) -> Body:
    return {"results": [_result(topic["name"], code, None) for topic in body["topics"]]}


API = Api(37, "create_partitions", 0, 3, cold(handle, failed), barrier=True)
