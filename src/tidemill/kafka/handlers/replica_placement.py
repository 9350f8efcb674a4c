"""Handlers of the APIs that move replicas or leaders, none of which ever moves anything.

A broker has one directory, the bucket, every partition is already there, and leaders follow the live nodes:

    AlterReplicaLogDirs (34)            versions 1 and 2: moving a partition to the bucket succeeds, and there is no
                                        other directory (LOG_DIR_NOT_FOUND)
    ElectLeaders (43)                   versions 0 to 2: an election would change nothing: each existing partition is
                                        ELECTION_NOT_NEEDED, as if its preferred replica led it
    AlterPartitionReassignments (45)    version 0: replicas other than the leader are INVALID_REPLICA_ASSIGNMENT, the
                                        leader alone is the current state, and canceling a reassignment (null) is
                                        NO_REASSIGNMENT_IN_PROGRESS
    ListPartitionReassignments (46)     version 0: always an empty list
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.handlers.k35_describe_log_dirs import BUCKET
from tidemill.kafka.schema.codec_compiler import Body

PartitionCode = Callable[[str, Body], int]
"""Function of a topic and the requested partition; returns the partition's code."""

NOTHING_TO_ELECT: Final = "Leaders follow the live nodes; there is nothing to elect."
NOTHING_TO_MOVE: Final = "Records are in the bucket and leaders follow the live nodes: there are no replicas to move."


async def alter_replica_log_dirs(context: Context, request: Request, body: Body) -> Body:
    topics = [topic for directory in body["dirs"] for topic in directory["topics"]]
    await context.cache.settle_topics(((t["name"], index) for t in topics for index in t["partitions"]), is_id=False)
    results = []
    for directory in body["dirs"]:
        known = directory["path"] == BUCKET
        for topic in directory["topics"]:
            codes = [(i, _log_dir_code(context, topic["name"], i, known=known)) for i in topic["partitions"]]
            results.append(_log_dir_result(topic["name"], codes))
    return {"results": results}


def _log_dir_code(context: Context, name: str, index: int, *, known: bool) -> int:
    row = context.cache.resolve(name, is_id=False)
    if isinstance(row, int):
        return row
    if not 0 <= index < row.partitions:
        return context.cache.missing_partition_code(row, index)
    return error_codes.NONE if known else error_codes.LOG_DIR_NOT_FOUND


def _log_dir_result(name: str, codes: list[tuple[int, int]]) -> Body:
    partitions = [{"partition_index": index, "error_code": code} for index, code in codes]
    return {"topic_name": name, "partitions": partitions}


def _log_dirs_error(body: Body, code: int) -> Body:
    topics = [topic for directory in body["dirs"] for topic in directory["topics"]]
    return {
        "results": [
            _log_dir_result(topic["name"], [(index, code) for index in topic["partitions"]]) for topic in topics
        ]
    }


async def elect_leaders(context: Context, request: Request, body: Body) -> Body:
    topics = body["topic_partitions"] or ()
    await context.cache.settle_topics(((t["topic"], index) for t in topics for index in t["partitions"]), is_id=False)
    results = []
    for topic in topics:
        found = []
        for index in topic["partitions"]:
            row = context.cache.resolve(topic["topic"], is_id=False)
            code = error_codes.ELECTION_NOT_NEEDED
            if isinstance(row, int):
                code = row
            elif not 0 <= index < row.partitions:
                code = context.cache.missing_partition_code(row, index)
            found.append(_election_result(index, code))
        results.append({"topic": topic["topic"], "partition_result": found})
    return {"error_code": 0, "replica_election_results": results}


def _election_result(index: int, code: int) -> Body:
    message = NOTHING_TO_ELECT if code == error_codes.ELECTION_NOT_NEEDED else None
    return {"partition_id": index, "error_code": code, "error_message": message}


def _election_error(body: Body, code: int) -> Body:
    return {
        "error_code": code,
        "replica_election_results": [
            {
                "topic": topic["topic"],
                "partition_result": [_election_result(index, code) for index in topic["partitions"]],
            }
            for topic in body["topic_partitions"] or ()
        ],
    }


async def alter_partition_reassignments(context: Context, request: Request, body: Body) -> Body:
    places = ((t["name"], p["partition_index"]) for t in body["topics"] for p in t["partitions"])
    await context.cache.settle_topics(places, is_id=False)
    node_ids = {broker.name: broker.node_id for broker in context.brokers()}

    def code(name: str, partition: Body) -> int:
        index, replicas = partition["partition_index"], partition["replicas"]
        row = context.cache.resolve(name, is_id=False)
        if isinstance(row, int):
            return row
        if not 0 <= index < row.partitions:
            return context.cache.missing_partition_code(row, index)
        if replicas is None:
            return error_codes.NO_REASSIGNMENT_IN_PROGRESS
        there = [node_ids.get(context.topics.leader_of(row.topic_id, index))]
        return error_codes.NONE if list(replicas) == there else error_codes.INVALID_REPLICA_ASSIGNMENT

    return _reassignment_answer(body, code)


def _reassignment_answer(body: Body, code: PartitionCode, error_code: int = 0) -> Body:
    responses = []
    for topic in body["topics"]:
        partitions = []
        for partition in topic["partitions"]:
            found = code(topic["name"], partition)
            message = NOTHING_TO_MOVE if found == error_codes.INVALID_REPLICA_ASSIGNMENT else None
            index = partition["partition_index"]
            partitions.append({"partition_index": index, "error_code": found, "error_message": message})
        responses.append({"name": topic["name"], "partitions": partitions})
    return {"error_code": error_code, "error_message": None, "responses": responses}


def _reassignment_error(body: Body, code: int) -> Body:
    return _reassignment_answer(body, lambda *_: code, code)


async def list_partition_reassignments(context: Context, request: Request, body: Body) -> Body:
    return {"error_code": 0, "error_message": None, "topics": []}


def _reassignments_error(body: Body, code: int) -> Body:
    return {"error_code": code, "error_message": None, "topics": []}


APIS: Final = (
    Api(34, "alter_replica_log_dirs", 1, 2, begin_decoded(alter_replica_log_dirs, _log_dirs_error)),
    Api(43, "elect_leaders", 0, 2, begin_decoded(elect_leaders, _election_error)),
    Api(45, "alter_partition_reassignments", 0, 0, begin_decoded(alter_partition_reassignments, _reassignment_error)),
    Api(46, "list_partition_reassignments", 0, 0, begin_decoded(list_partition_reassignments, _reassignments_error)),
)
