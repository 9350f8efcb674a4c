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

from tidemill.base.runtime.tasks import is_own_fault, sentence
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import LARGE_ANSWER_ELEMENTS, Api, Reply, Request, decoded
from tidemill.kafka.fetch_sessions.implicit import Repeated
from tidemill.kafka.fetch_sessions.partitions import Interest, Key
from tidemill.kafka.fetch_sessions.sessions import FINAL, INITIAL, NO_SESSION
from tidemill.kafka.schema.fetch import FetchRequest, FetchTopic, PartitionRecords, decode, encode

log = structlog.get_logger()

FIRST_WITH_IDS = 13

Answers = list[tuple[str, list[PartitionRecords]]]


async def begin(context: Context, request: Request) -> Reply:
    """Answer one Fetch.

    An internal error fails only this request: its partitions get a retriable code.
    """
    taken = context.repeats.take(request)
    if taken is not None:
        reply = await _again(context, request, *taken)
        if reply is not None:
            return reply
    fetch = await decoded(context.pace, request, lambda _: decode(request.view, request.position, request.version))
    try:
        if fetch.session_epoch in (INITIAL, FINAL):
            return await _full(context, request, fetch)
        return await _changed(context, request, fetch)
    except BaseException as error:
        if not is_own_fault(error):
            raise
        fault = error
    _tell(request, fault)
    code = error_codes.code_of(fault)
    failed = [(t.topic, [PartitionRecords(p.partition, code) for p in t.partitions]) for t in fetch.topics]
    return encode(failed, request.version)


def _tell(request: Request, fault: BaseException) -> None:
    log.error("kafka.request_fault", key=1, client_id=request.client_id, error=sentence(fault), exc_info=fault)


async def _again(context: Context, request: Request, repeated: Repeated, changes: list[FetchTopic]) -> Reply | None:
    """Answer a request that repeats the connection's last one, without a session.

    Return None if it must be processed from scratch.
    """
    kept = False
    try:
        interest = repeated.interest
        await interest.look_again()
        await interest.ask(changes)
        found = await interest.fetch(repeated.fetch)
        if repeated.session.closed:
            return None
        reply = repeated.answer(found.items())
        context.repeats.keep(request, repeated)
        kept = True
        return reply
    except BaseException as error:
        if not is_own_fault(error):
            raise
        _tell(request, error)
        return None
    finally:
        if not kept:
            context.repeats.close(repeated)


async def _full(context: Context, request: Request, fetch: FetchRequest) -> Reply:
    """Answer a request that names all its partitions. A session that it names ends."""
    visitor, sessions = request.visitor, context.fetch_sessions
    sessions.close_of(fetch.session_id, principal=visitor.principal, host=visitor.host)
    interest = Interest(context, visitor, by_id=request.version >= FIRST_WITH_IDS)
    session, reply = None, None
    try:
        await interest.ask(fetch.topics)
        found = await interest.fetch(fetch)
        if fetch.session_epoch == FINAL:
            reply = await context.repeats.begin(request, fetch, interest, found)
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
    return await _encoded(answers, request.version, session.id if session is not None else NO_SESSION)


async def _changed(context: Context, request: Request, fetch: FetchRequest) -> Reply:
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
        await interest.look_again()
        await interest.ask(fetch.topics)
        await interest.forget(fetch.forgotten)
        if not sessions.grown(session):
            return encode([], version, error_code=error_codes.FETCH_SESSION_ID_NOT_FOUND)
        if not len(interest):
            sessions.close(session)
            return encode([], version)
        found = await interest.fetch(fetch)
    except BaseException as error:
        if is_own_fault(error):
            sessions.close(session)
        raise
    finally:
        session.busy = False
    if session.closed:
        return encode([], version, error_code=error_codes.FETCH_SESSION_ID_NOT_FOUND)
    return await _encoded(_by_topic(found), version, session.id)


def _by_topic(found: dict[Key, PartitionRecords]) -> Answers:
    topics: dict[str, list[PartitionRecords]] = {}
    for (topic, _), answer in found.items():
        topics.setdefault(topic, []).append(answer)
    return list(topics.items())


async def _encoded(answers: Answers, version: int, session_id: int) -> Reply:
    if sum(len(partitions) for _, partitions in answers) < LARGE_ANSWER_ELEMENTS:
        return encode(answers, version, session_id=session_id)
    return await asyncio.to_thread(encode, answers, version, session_id=session_id)


API = Api(1, "fetch", 4, 17, begin, abandon=True, at_once=4)
