"""Handler of CreateTopics (19), versions 2 to 7.

A topic is a catalogue row. num_partitions −1 means the default. A manual assignment determines the number of
partitions, but not their leaders. Any replication factor of at least 1, or −1, is accepted and answered as 1, because
the bucket replicates the data. Configs are applied (`topics.config`), or rejected by INVALID_CONFIG with the name.
Topics beyond the cluster's `partitions_max` are rejected (POLICY_VIOLATION).
"""

from __future__ import annotations

from collections import Counter

from tidemill.base.errors import ConflictError, InvalidError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded, map_items, run_with_timeout
from tidemill.kafka.handlers.k32_describe_configs import topic_entries
from tidemill.kafka.handlers.k37_create_partitions import InvalidReplicaAssignmentError, check_assignments
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.metastore.catalogue import PARTITIONS_MAX, TopicRow, check_topic_name
from tidemill.topics.config.configs import parse_topic_config


async def handle(context: Context, request: Request, body: Body) -> Body:
    named = Counter(topic["name"] for topic in body["topics"])

    async def create(topic: Body) -> Body:
        if named[topic["name"]] > 1:
            return _error_result(topic["name"], error_codes.INVALID_REQUEST, "The request names the topic twice.")
        work = _create(context, topic, validate_only=body.get("validate_only", False))
        late = _error_result(
            topic["name"], error_codes.REQUEST_TIMED_OUT, "The topic may still be created: check again."
        )
        return await run_with_timeout(body["timeout"], work, late=late)

    return {"topics": await map_items(body["topics"], create, context.pace)}


async def _create(context: Context, topic: Body, *, validate_only: bool) -> Body:
    name = topic["name"]
    partitions = len(topic["assignments"]) or topic["num_partitions"]
    if partitions == -1:
        partitions = context.settings.section.default_partitions
    # A null value means the default, like a missing config.
    configs = {config["name"]: config["value"] for config in topic["configs"] if config["value"] is not None}
    try:
        check_topic_name(name)
    except InvalidError as error:
        return _error_result(name, error_codes.INVALID_TOPIC_EXCEPTION, str(error))
    if topic["assignments"]:
        if topic["num_partitions"] != -1 or topic["replication_factor"] != -1:
            return _error_result(
                name, error_codes.INVALID_REQUEST, "Leave partitions and replication factor at -1 with assignments."
            )
        assigned = {each["partition_index"]: each["broker_ids"] for each in topic["assignments"]}
        try:
            if sorted(assigned) != list(range(len(topic["assignments"]))):
                raise InvalidReplicaAssignmentError(
                    f"the assigned partitions are not 0 to n-1: partitions={sorted(assigned)}."
                )
            check_assignments(list(assigned.values()), len(assigned), context.brokers())
        except InvalidReplicaAssignmentError as error:
            return _error_result(name, error_codes.INVALID_REPLICA_ASSIGNMENT, str(error))
    if not 1 <= partitions <= PARTITIONS_MAX:
        return _error_result(name, error_codes.INVALID_PARTITIONS, f"Use 1 to {PARTITIONS_MAX} partitions.")
    if topic["replication_factor"] == 0 or topic["replication_factor"] < -1:
        return _error_result(name, error_codes.INVALID_REPLICATION_FACTOR, "Use 1, or -1 for the default.")
    try:
        parse_topic_config(configs)
    except InvalidError as error:
        return _error_result(name, error_codes.INVALID_CONFIG, str(error))
    limit = context.settings.section.partitions_max
    if context.cache.partitions + context.cache.creating + partitions > limit:
        return _error_result(
            name, error_codes.POLICY_VIOLATION, f"Too many partitions in the cluster: kafka.partitions_max={limit}."
        )
    context.cache.creating += partitions
    try:
        if validate_only:
            row = await context.catalogue.get(TopicRow, name)
            if row is not None:
                raise ConflictError(f"topic exists: topic={name}.", current=row)
            row = TopicRow(name, "", partitions, config=configs)
        else:
            row = await context.catalogue.create_topic(
                name, partitions, config=context.settings.topic_defaults | configs
            )
            context.cache.add(row)
    except ConflictError as error:
        return _error_result(name, error_codes.TOPIC_ALREADY_EXISTS, str(error))
    except TidemillError as error:
        return _error_result(name, error_codes.REQUEST_TIMED_OUT, str(error))
    finally:
        context.cache.creating -= partitions
    return _created(context, row)


def _created(context: Context, row: TopicRow) -> Body:
    """Return the answer for a created topic, with its configs as DescribeConfigs reports them, as Kafka does."""
    keys = ("name", "value", "read_only", "config_source", "is_sensitive")
    return {
        "name": row.name,
        "topic_id": row.topic_id,
        "error_code": 0,
        "error_message": None,
        "num_partitions": row.partitions,
        "replication_factor": 1,
        "configs": [{key: entry[key] for key in keys} for entry in topic_entries(context, row)],
    }


def _error_result(name: str, code: int, message: str | None) -> Body:
    return {"name": name, "topic_id": None, "error_code": code, "error_message": message, "configs": None}


def error_answer(body: Body, code: int) -> Body:
    return {"topics": [_error_result(topic["name"], code, None) for topic in body["topics"]]}


API = Api(19, "create_topics", 2, 7, begin_decoded(handle, error_answer), barrier=True)
