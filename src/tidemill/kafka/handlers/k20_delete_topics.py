"""Handler of DeleteTopics (20), versions 1 to 6: by name, from v6 also by topic id.

It deletes the row from the catalogue; `topics` deletes the data later. A topic that a capture writes or a pipeline
reads is POLICY_VIOLATION: only `tidemill topic delete` can delete it, after a confirmation.
"""

from __future__ import annotations

from tidemill.base.errors import MissingError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.kafka.schema.primitives import ZERO_UUID
from tidemill.metastore.catalogue import TopicRow
from tidemill.security.acls import Operation, Resource
from tidemill.topics.lifecycle.deletion import find_topic_users


async def handle(context: Context, request: Request, body: Body) -> Body:
    asked = body["topics"] if request.version >= 6 else [{"name": name} for name in body["topic_names"]]
    return {"responses": [await _delete(context, request, t.get("name"), t.get("topic_id")) for t in asked]}


async def _delete(context: Context, request: Request, name: str | None, topic_id: str | None) -> Body:
    by_id = not name and topic_id not in (None, ZERO_UUID)
    missing = error_codes.UNKNOWN_TOPIC_ID if by_id else error_codes.UNKNOWN_TOPIC_OR_PARTITION
    answer: Body = {"name": name, "topic_id": topic_id, "error_code": 0, "error_message": None}
    try:
        if by_id:
            await context.cache.refresh()
            row = context.cache.by_id(topic_id or "")
        else:
            row = await context.catalogue.get(TopicRow, name or "")
        if row is None:
            return {**answer, "error_code": missing}
        if by_id and not context.access.is_allowed(request.visitor, Operation.DELETE, Resource.TOPIC, row.name):
            # The id was not known here when the request was checked.
            return {**answer, "error_code": error_codes.TOPIC_AUTHORIZATION_FAILED}
        answer |= {"name": row.name, "topic_id": row.topic_id}
        users = await find_topic_users(context.catalogue, row) or (["capture"] if row.kind == "capture" else [])
        if users:
            message = f"The topic is in use: topic={row.name} by={', '.join(users)}."
            return {**answer, "error_code": error_codes.POLICY_VIOLATION, "error_message": message}
        await context.catalogue.delete_topic(row)
        context.cache.remove(row)
    except MissingError:
        return {**answer, "error_code": missing}
    except TidemillError as error:
        return {**answer, "error_code": error_codes.REQUEST_TIMED_OUT, "error_message": str(error)}
    return answer


def error_answer(body: Body, code: int) -> Body:
    asked = body.get("topics") or [{"name": name} for name in body.get("topic_names") or []]
    return {"responses": [{"name": t.get("name"), "topic_id": t.get("topic_id"), "error_code": code} for t in asked]}


API = Api(20, "delete_topics", 1, 6, begin_decoded(handle, error_answer), barrier=True)
