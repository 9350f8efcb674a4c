"""CreateTopics (19), versions 2 to 7.

A topic is a catalogue row. num_partitions −1 takes the default; a manual assignment gives its length (which node
leads is not the client's to say). Any replication factor of at least 1, or −1, is accepted and answered as 1:
copies are the bucket's. Configs are honoured (`topics.configs`) or INVALID_CONFIG with the name; no topic is made
beyond `partitions_max` in all (POLICY_VIOLATION).
"""

from __future__ import annotations

from collections import Counter

from tidemill.base.errors import Conflict, Invalid, TidemillError
from tidemill.kafka import errors
from tidemill.kafka.context import Context
from tidemill.kafka.request import Api, Request, cold
from tidemill.kafka.schema.compiled import Body
from tidemill.metastore.catalogue import TopicRow, check_topic_name
from tidemill.topics.configs import topic_config

PARTITIONS_MAX = 10_000


async def handle(context: Context, request: Request, body: Body) -> Body:
    named = Counter(topic["name"] for topic in body["topics"])
    answers = []
    for topic in body["topics"]:
        if named[topic["name"]] > 1:
            answers.append(_refused(topic["name"], errors.INVALID_REQUEST, "The request names this topic twice."))
        else:
            answers.append(await _create(context, topic, validate_only=body.get("validate_only", False)))
    return {"topics": answers}


async def _create(context: Context, topic: Body, *, validate_only: bool) -> Body:
    name = topic["name"]
    partitions = len(topic["assignments"]) or topic["num_partitions"]
    if partitions == -1:
        partitions = context.settings.default_partitions
    configs = {config["name"]: config["value"] or "" for config in topic["configs"]}
    try:
        check_topic_name(name)
    except Invalid as error:
        return _refused(name, errors.INVALID_TOPIC_EXCEPTION, str(error))
    if not 1 <= partitions <= PARTITIONS_MAX:
        return _refused(name, errors.INVALID_PARTITIONS, f"Use 1 to {PARTITIONS_MAX} partitions.")
    if topic["replication_factor"] == 0 or topic["replication_factor"] < -1:
        return _refused(name, errors.INVALID_REPLICATION_FACTOR, "Use 1, or -1 for the default.")
    try:
        topic_config(configs)
    except Invalid as error:
        return _refused(name, errors.INVALID_CONFIG, str(error))
    limit = context.settings.partitions_max
    if context.cache.partitions + partitions > limit:
        return _refused(name, errors.POLICY_VIOLATION, f"Too many partitions in all: kafka.partitions_max={limit}.")
    try:
        if validate_only:
            row = await context.catalogue.get(TopicRow, name)
            if row is not None:
                raise Conflict(f"topic exists: topic={name}.", current=row)
            row = TopicRow(name, "", partitions, config=configs)
        else:
            row = await context.catalogue.create_topic(
                name, partitions, config=context.settings.topic_defaults | configs
            )
            context.cache.learn(row)
    except Conflict as error:
        return _refused(name, errors.TOPIC_ALREADY_EXISTS, str(error))
    except TidemillError as error:
        return _refused(name, errors.REQUEST_TIMED_OUT, str(error))
    return _created(row)


def _created(row: TopicRow) -> Body:
    return {
        "name": row.name,
        "topic_id": row.topic_id,
        "error_code": 0,
        "error_message": None,
        "num_partitions": row.partitions,
        "replication_factor": 1,
        "configs": [
            {"name": name, "value": value, "read_only": False, "config_source": 1, "is_sensitive": False}
            for name, value in sorted(row.config.items())
        ],
    }


def _refused(name: str, code: int, message: str) -> Body:
    return {"name": name, "topic_id": None, "error_code": code, "error_message": message, "configs": None}


def failed(body: Body, code: int) -> Body:
    return {"topics": [_refused(topic["name"], code, "") for topic in body["topics"]]}


API = Api(19, "create_topics", 2, 7, cold(handle, failed))
