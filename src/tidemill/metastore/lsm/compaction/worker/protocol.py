"""Protocol between a database and its compaction worker over the worker's stdin and stdout.

frame  length uint32 little end first | msgpack of one of the structs below

Frames carry only names and sizes: the bytes of files go between the worker and the object store.
"""

from __future__ import annotations

import asyncio

import msgspec

from tidemill.base import errors
from tidemill.base.errors import TidemillError, UnknownOutcomeError
from tidemill.metastore.lsm.compaction.picker import Job
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options

_LENGTH_BYTES = 4


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first frame. The URL may contain secrets, so it is not a command line argument: those are visible to all."""

    objects_url: str
    options: Options
    nice: int
    idle_s: float


class Work(msgspec.Struct, frozen=True, tag=True):
    job: Job


class Progressed(msgspec.Struct, frozen=True, tag=True):
    rows_done: int


class Done(msgspec.Struct, frozen=True, tag=True):
    files: list[FileMeta]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Error of a job. `kind` names a class of base.errors."""

    kind: str
    message: str
    fix: str

    @classmethod
    def of(cls, error: TidemillError) -> Failed:
        return cls(type(error).__name__, error.message, error.fix)

    def error(self) -> TidemillError:
        kind = getattr(errors, self.kind, UnknownOutcomeError)
        made: TidemillError = kind(self.message, fix=self.fix)
        return made


ToWorker = Setup | Work
FromWorker = Progressed | Done | Failed

_encode = msgspec.msgpack.Encoder().encode
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)


def frame(message: ToWorker | FromWorker) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the body of the next frame. Raises asyncio.IncompleteReadError if the other side is gone."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    return await reader.readexactly(length)
