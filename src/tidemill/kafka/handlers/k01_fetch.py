"""Handler of Fetch (1), versions 4 to 17.

The requested partitions are followed (`fetch_sessions.partitions`): the answer waits, event-driven, for min_bytes or
max_wait. A partition that fails ends the wait, unless it is refused permanently, and so does a limit that leaves
records out. Batches are complete, the first one contains the requested offset (clients skip forward), at least one is
returned if there is any, and their bytes are sent as `topics` returned them.

Fetch sessions (v7) follow KIP-227: `fetch_sessions.sessions`. The answer of a session contains the partitions that have
records or an error, or an offset (high watermark, last stable, log start) that changed since it was last sent. For
clients without sessions, the last request of the connection is stored: `fetch_sessions.implicit`.

read_committed reads up to the last stable offset and lists the aborted transactions among the returned records
(KIP-98).

Not supported: follower fetching (KIP-392), leader epoch checks, divergence (tags of v12), `rack_id`.
"""

from __future__ import annotations

import asyncio

import structlog

from tidemill.base.runtime.tasks import error_sentence, is_own_fault_of_await
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import LARGE_ANSWER_ELEMENTS, Api, Reply, Request, decode_body
from tidemill.kafka.fetch_sessions.implicit import ImplicitSession
from tidemill.kafka.fetch_sessions.partitions import FetchedPartitions, Key
from tidemill.kafka.fetch_sessions.sessions import FINAL, INITIAL, NO_SESSION
from tidemill.kafka.schema.fetch import FetchRequest, FetchTopic, PartitionRecords, decode, encode

log = structlog.get_logger()

FIRST_WITH_IDS = 13

Answers = list[tuple[str, list[PartitionRecords]]]


async def begin_fetch(context: Context, request: Request) -> Reply:
    """Answer one Fetch.

    An internal error fails only this request: its partitions get a retriable code.
    """
    taken = context.repeats.claim(request)
    if taken is not None:
        reply = await _fetch_repeated(context, request, *taken)
        if reply is not None:
            return reply
    fetch = await decode_body(context.pace, request, lambda _: decode(request.view, request.position, request.version))
    try:
        if fetch.session_epoch in (INITIAL, FINAL):
            return await _fetch_full(context, request, fetch)
        return await _fetch_incremental(context, request, fetch)
    except BaseException as error:
        if not is_own_fault_of_await(error):
            raise
        fault = error
    _log_fault(request, fault)
    code = error_codes.fetch_code_of(fault)
    failed = [(t.topic, [PartitionRecords(p.partition, code) for p in t.partitions]) for t in fetch.topics]
    return encode(failed, request.version)


def _log_fault(request: Request, fault: BaseException) -> None:
    log.error("kafka.request_fault", key=1, client_id=request.client_id, error=error_sentence(fault), exc_info=fault)


async def _fetch_repeated(
    context: Context, request: Request, repeated: ImplicitSession, changes: list[FetchTopic]
) -> Reply | None:
    """Answer a request that repeats the connection's last one, without a session.

    Return None if it must be processed from scratch.
    """
    kept = False
    try:
        interest = repeated.interest
        await interest.refresh()
        await interest.add_topics(changes)
        found = await interest.fetch(repeated.fetch)
        if repeated.session.closed:
            return None
        reply = repeated.encode_answer(found.items())
        context.repeats.store(request, repeated)
        kept = True
        return reply
    except BaseException as error:
        if not is_own_fault_of_await(error):
            raise
        _log_fault(request, error)
        return None
    finally:
        if not kept:
            context.repeats.close(repeated)


async def _fetch_full(context: Context, request: Request, fetch: FetchRequest) -> Reply:
    """Answer a request that names all its partitions. A session that it names ends."""
    visitor, sessions = request.visitor, context.fetch_sessions
    sessions.close_by_id(fetch.session_id, principal=visitor.principal, host=visitor.host)
    interest = FetchedPartitions(context, visitor, by_id=request.version >= FIRST_WITH_IDS)
    session, reply = None, None
    try:
        await interest.add_topics(fetch.topics)
        found = await interest.fetch(fetch)
        if fetch.session_epoch == FINAL:
            reply = await context.repeats.create(request, fetch, interest, found)
        elif len(interest):
            session = sessions.open(interest)
    finally:
        if session is None and reply is None:
            interest.close()
    if reply is not None:
        return reply
    # A partition that is named twice is answered once.
    answers: Answers = []
    for topic in fetch.topics:
        keys = ((topic.topic, asked.partition) for asked in topic.partitions)
        answers.append((topic.topic, [found.pop(key) for key in keys if key in found]))
    return await _encode(answers, request.version, session.id if session is not None else NO_SESSION)


async def _fetch_incremental(context: Context, request: Request, fetch: FetchRequest) -> Reply:
    """Answer an incremental request of a session."""
    visitor, version, sessions = request.visitor, request.version, context.fetch_sessions
    by_id = version >= FIRST_WITH_IDS
    session = sessions.find(
        fetch.session_id, fetch.session_epoch, principal=visitor.principal, host=visitor.host, by_id=by_id
    )
    if isinstance(session, int):
        return encode([], version, error_code=session)
    interest, session.busy = session.interest, True
    try:
        await interest.refresh()
        await interest.add_topics(fetch.topics)
        await interest.remove_topics(fetch.forgotten)
        if not sessions.update_size(session):
            return encode([], version, error_code=error_codes.FETCH_SESSION_ID_NOT_FOUND)
        if not len(interest):
            sessions.close(session)
            return encode([], version)
        found = await interest.fetch(fetch)
    except BaseException as error:
        if is_own_fault_of_await(error):
            sessions.close(session)
        raise
    finally:
        session.busy = False
    if session.closed:
        return encode([], version, error_code=error_codes.FETCH_SESSION_ID_NOT_FOUND)
    return await _encode(_group_by_topic(found), version, session.id)


def _group_by_topic(found: dict[Key, PartitionRecords]) -> Answers:
    topics: dict[str, list[PartitionRecords]] = {}
    for (topic, _), answer in found.items():
        topics.setdefault(topic, []).append(answer)
    return list(topics.items())


async def _encode(answers: Answers, version: int, session_id: int) -> Reply:
    if sum(len(partitions) for _, partitions in answers) < LARGE_ANSWER_ELEMENTS:
        return encode(answers, version, session_id=session_id)
    return await asyncio.to_thread(encode, answers, version, session_id=session_id)


API = Api(1, "fetch", 4, 17, begin_fetch, abandon=True, at_once=4)
