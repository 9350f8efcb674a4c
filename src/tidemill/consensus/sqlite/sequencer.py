"""The sequencer: one thread that owns the database, serves every local process and commits in groups.

    round:  receive from all connections → one commit of all writes → reads → answers → waiters

The thread runs its own selector, so a busy event loop of the hosting process does not delay other processes. Writes are
decided before the reads of the same round, and reads see only committed state. All requests of a round are concurrent,
so any order between them is linearizable.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import CorruptError, InvalidError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime import file_descriptors
from tidemill.consensus.operations import AnyOp, Append, Wait
from tidemill.consensus.sqlite import protocol, sockets
from tidemill.consensus.sqlite.engine import CommitOutcomeUnknownError, SqliteEngine

RECEIVE_BYTES = 1 << 20
"""Limit per connection and round, so that every process progresses under any load of the others."""

UNREAD_ANSWER_BYTES = 64 << 20
"""Limit of unread answers; a client that exceeds it is not read from until it reads them."""

ACCEPT_PAUSE_S = 0.2
"""Pause in accepting after an accept failed although the reserve of descriptors was released."""

_lives = itertools.count()

log = structlog.get_logger()


class ClientConnection:
    """A client's connection. `answers` wait for the round's end, `out` for the socket; `waits`: request id → log."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.splitter = protocol.FrameSplitter()
        self.answers: list[protocol.Message] = []
        self.out = bytearray()
        self.client = ""
        self.closed = False
        self.waits: dict[int, str] = {}


class Sequencer:
    """The server of one database. `start` returns immediately; `stop` is orderly.

    `opened` is set when it serves or has failed (`failure`).
    """

    def __init__(self, database: Path, clock: Clock, on_end: Callable[[], None]) -> None:
        self._database = database
        self._clock = clock
        self._on_end = on_end
        self._life = f"{os.getpid()}-{clock.now_ms()}-{next(_lives)}"
        self.opened = threading.Event()
        self.failure: TidemillError | None = None
        self._stopping = False
        self._connections: dict[int, ClientConnection] = {}
        self._clients: dict[str, ClientConnection] = {}
        self._waiters: dict[str, dict[tuple[int, int], tuple[int, ClientConnection]]] = {}
        self._listener: socket.socket | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._reserve = file_descriptors.DescriptorReserve()
        self._most_clients = file_descriptors.current_shares().sequencer
        self._rests = False
        self._room = memoryview(bytearray(RECEIVE_BYTES))
        """Reused receive buffer: `recv` would allocate an object of this size each time, for a few hundred bytes."""
        self._thread = threading.Thread(target=self._run, name="tidemill-sequencer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the current round, send goodbyes, close the database. Blocks until done."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=30)

    def abandon_in_child(self) -> None:
        """Close the inherited descriptors in a forked child, without touching the database; the parent continues."""
        own = [self._listener, self._wake_receiver, self._wake_sender]
        for sock in [*own, *(connection.sock for connection in self._connections.values())]:
            if sock is not None:
                # An open copy of the listener would accept clients and never serve them.
                sock.close()

    # the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except TidemillError as error:
            self.failure = error
            log.error("sequencer stopped", database=str(self._database), error=str(error))
        except BaseException as error:
            self.failure = UnavailableError(f"the sequencer failed: database={self._database} reason={error!r}.")
            log.exception("sequencer failed", database=str(self._database))
        finally:
            for connection in list(self._connections.values()):
                self._close_connection(connection)
            self._wake_receiver.close()
            self._reserve.close()
            self._on_end()
            self.opened.set()

    def _serve(self) -> None:
        with self._reserve.released(), contextlib.ExitStack() as opening:
            engine = SqliteEngine(self._database, self._clock)
            opening.callback(engine.close)
            listener, bound = sockets.bind_listener(self._database)
            opening.callback(listener.close)
            selector = selectors.DefaultSelector()
            opening.pop_all()
        try:
            with contextlib.ExitStack() as stack:
                self._listener = stack.enter_context(listener)
                self._selector = stack.enter_context(selector)
                selector.register(listener, selectors.EVENT_READ)
                selector.register(self._wake_receiver, selectors.EVENT_READ)
                self.opened.set()
                while not self._stopping:
                    self._run_round(engine, listener)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(bound)
                for connection in list(self._connections.values()):
                    self._say_goodbye(connection)
        finally:
            engine.close()

    def _run_round(self, engine: SqliteEngine, listener: socket.socket) -> None:
        writes: list[tuple[ClientConnection, int, Any]] = []
        reads: list[tuple[ClientConnection, int, AnyOp]] = []
        for key, events in self._selector.select(ACCEPT_PAUSE_S if self._rests else None):
            if key.fileobj is listener:
                self._accept(listener)
            elif key.fileobj is self._wake_receiver:
                with contextlib.suppress(BlockingIOError):
                    self._wake_receiver.recv(4096)
            else:
                connection: ClientConnection = key.data
                if events & selectors.EVENT_READ and not connection.closed:
                    self._receive(connection, writes, reads)
        if writes:
            self._commit(engine, writes, reads)
        for connection, request_id, op in reads:
            try:
                answer = engine.execute_read(op)
            except TidemillError as error:
                connection.answers.append(protocol.error_answer(request_id, error))
                if isinstance(error, CorruptError):
                    log.error("database damaged", database=str(self._database), error=str(error))
            except Exception as error:
                connection.answers.append(protocol.error_answer(request_id, _unexpected_error(op, error)))
            else:
                if isinstance(op, Wait) and not answer:
                    self._add_waiter(connection, request_id, op)
                else:
                    connection.answers.append(protocol.result_answer(request_id, answer))
        for connection in [*self._connections.values()]:
            if connection.answers or connection.out:
                self._flush(connection)
        if self._rests or len(self._reserve) < file_descriptors.RESERVE_DESCRIPTORS:
            self._resume_accepting(listener)

    def _commit(self, engine: SqliteEngine, writes: list[tuple[ClientConnection, int, Any]], reads: list[Any]) -> None:
        try:
            outcomes = engine.commit([op for _, _, op in writes])
        except CommitOutcomeUnknownError as error:
            doubt: TidemillError = UnknownOutcomeError(f"the commit's outcome is unknown: reason={error}.")
            self._refuse_all(writes, doubt)
            self._refuse_all(reads, UnavailableError("the sequencer reopens its database after a failed commit."))
            raise UnavailableError(f"a commit failed, the database is reopened: reason={error}.") from error
        except CorruptError as error:
            self._refuse_all(writes, error)
            self._refuse_all(reads, error)
            raise
        except TidemillError as error:
            self._refuse_all(writes, error if isinstance(error, UnavailableError) else UnavailableError(str(error)))
            return
        except Exception as error:
            # The group was rolled back. One operation failed unexpectedly: commit each on its own.
            if len(writes) == 1:
                self._refuse_all(writes, _unexpected_error(writes[0][2], error))
                return
            for write in writes:
                self._commit(engine, [write], reads)
            return
        advanced: dict[str, int] = {}
        for (connection, request_id, op), outcome in zip(writes, outcomes, strict=True):
            if isinstance(outcome, TidemillError):
                connection.answers.append(protocol.error_answer(request_id, outcome))
            else:
                connection.answers.append(protocol.result_answer(request_id, outcome))
                if type(op) is Append:
                    advanced[op.log] = outcome.next
        if self._waiters:
            for log_name, next_position in advanced.items():
                self._wake_waiters(log_name, next_position)

    def _refuse_all(self, requests: list[tuple[ClientConnection, int, Any]], error: TidemillError) -> None:
        for connection, request_id, _ in requests:
            connection.answers.append(protocol.error_answer(request_id, error))
        for connection in {id(c): c for c, _, _ in requests}.values():
            self._flush(connection)

    # waiters -------------------------------------------------------------------------------------

    def _add_waiter(self, connection: ClientConnection, request_id: int, op: Wait) -> None:
        connection.waits[request_id] = op.log
        waiting = self._waiters.setdefault(op.log, {})
        waiting[(id(connection), request_id)] = (op.beyond, connection)

    def _wake_waiters(self, log_name: str, next_position: int) -> None:
        for (_, request_id), (beyond, connection) in list(self._waiters.get(log_name, {}).items()):
            if next_position > beyond:
                self._remove_waiter(connection, request_id)
                connection.answers.append(protocol.result_answer(request_id, True))

    def _remove_waiter(self, connection: ClientConnection, request_id: int) -> None:
        log_name = connection.waits.pop(request_id, None)
        if log_name is None:
            return
        waiting = self._waiters[log_name]
        del waiting[(id(connection), request_id)]
        if not waiting:
            del self._waiters[log_name]

    # sockets -------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            if error.errno not in file_descriptors.EXHAUSTED:
                log.warning("a client could not be accepted", reason=str(error))
                self._pause_accepting(listener)
                return
            late = self._accept_from_reserve(listener)
            if late is None:
                return
            sock = late
        try:
            welcome = len(self._connections) < self._most_clients and sockets.is_served_user(sockets.peer_uid(sock))
            if welcome:
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ, ClientConnection(sock))
        except OSError as error:
            welcome = False
            log.warning("a client could not be served", reason=str(error))
        if not welcome:
            log.warning("a client is rejected", clients=len(self._connections), most=self._most_clients)
            sock.close()
            return
        self._connections[sock.fileno()] = self._selector.get_key(sock).data

    def _accept_from_reserve(self, listener: socket.socket) -> socket.socket | None:
        """Accept a client with a descriptor of the reserve, since this process has none left."""
        log.warning(
            "no descriptor is left for a client", open=file_descriptors.open_count(), reserve=len(self._reserve)
        )
        with self._reserve.released():
            try:
                return listener.accept()[0]
            except OSError:
                self._pause_accepting(listener)
                return None

    def _pause_accepting(self, listener: socket.socket) -> None:
        """Stop accepting for ACCEPT_PAUSE_S, since not even the reserve helped.

        Otherwise waiting clients would wake this thread constantly.
        """
        self._selector.unregister(listener)
        self._rests = True

    def _resume_accepting(self, listener: socket.socket) -> None:
        self._reserve.fill()
        if self._rests:
            self._rests = False
            self._selector.register(listener, selectors.EVENT_READ)

    def _receive(self, connection: ClientConnection, writes: list[Any], reads: list[Any]) -> None:
        try:
            data = bytes(self._room[: connection.sock.recv_into(self._room)])
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close_connection(connection)
            return
        try:
            for body in connection.splitter.feed(data):
                for request in protocol.decode_requests(body):
                    op = request.op
                    if op.writes:
                        writes.append((connection, request.id, op))
                    elif isinstance(op, protocol.Hello):
                        self._greet(connection, request.id, op)
                    elif isinstance(op, protocol.CancelWait):
                        self._remove_waiter(connection, op.request)
                    else:
                        reads.append((connection, request.id, op))
        except Exception as error:
            log.warning("peer does not speak the protocol", reason=str(error))
            self._close_connection(connection)

    def _greet(self, connection: ClientConnection, request_id: int, hello: protocol.Hello) -> None:
        if hello.version != protocol.WIRE_VERSION:
            mismatch = InvalidError(
                f"two versions of tidemill share a database: database={self._database}"
                f" theirs={hello.version} ours={protocol.WIRE_VERSION}.",
                fix="Run the same version in every process.",
            )
            connection.answers.append(protocol.error_answer(request_id, mismatch))
            return
        earlier = self._clients.get(hello.client)
        if earlier is not None and earlier is not connection:
            # Requests that the client sent there and that are still unread must never take effect: it may already count
            # them as lost.
            self._close_connection(earlier)
        connection.client = hello.client
        self._clients[hello.client] = connection
        connection.answers.append(protocol.result_answer(request_id, self._life))

    def _flush(self, connection: ClientConnection) -> None:
        if connection.closed:
            return
        if connection.answers:
            connection.out += protocol.encode_frames(connection.answers)
            connection.answers.clear()
        try:
            while connection.out:
                sent = connection.sock.send(memoryview(connection.out)[: 1 << 20])
                del connection.out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._close_connection(connection)
            return
        events = selectors.EVENT_WRITE if connection.out else 0
        if len(connection.out) < UNREAD_ANSWER_BYTES:
            events |= selectors.EVENT_READ
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _say_goodbye(self, connection: ClientConnection) -> None:
        """Send an orderly goodbye: requests of this client without an answer were not executed."""
        connection.out += protocol.encode_frames([*connection.answers, protocol.GOODBYE])
        with contextlib.suppress(OSError):
            connection.sock.settimeout(1.0)
            connection.sock.sendall(connection.out)

    def _close_connection(self, connection: ClientConnection) -> None:
        if connection.closed:
            return
        connection.closed = True
        for request_id in list(connection.waits):
            self._remove_waiter(connection, request_id)
        if self._clients.get(connection.client) is connection:
            del self._clients[connection.client]
        self._connections.pop(connection.sock.fileno(), None)
        with contextlib.suppress(KeyError, ValueError, RuntimeError):
            self._selector.unregister(connection.sock)
        connection.sock.close()


def _unexpected_error(op: object, error: Exception) -> UnavailableError:
    """Reject a request that failed unexpectedly, without harm to others."""
    log.error("an operation failed", op=type(op).__name__, exc_info=error)
    return UnavailableError(f"the sequencer could not execute the operation: op={type(op).__name__} reason={error!r}.")
