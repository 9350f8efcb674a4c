"""Open the consensus backend that a URL names."""

from __future__ import annotations

from pathlib import Path

from tidemill.base.address import without_credentials
from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import InvalidError, MissingError
from tidemill.base.runtime.private_directories import is_present
from tidemill.consensus.api import Consensus

FIX = "Write sqlite:///absolute/path/file.db, sqlite:relative/file.db, postgresql://user@host/database or memory:."


async def open_consensus(url: str, clock: Clock, rand: Rand, *, create: bool = True) -> Consensus:
    """Connect, and create what is missing. Return one client, for one event loop.

    Raises InvalidError (naming `consensus.url`), CorruptError, or UnavailableError if the engine does not
    answer, is full or is locked. Without `create` nothing is created: an engine that was never used raises
    MissingError. A `memory:` engine lives only as long as the returned object.
    """
    scheme, separator, rest = url.partition(":")
    file = sqlite_path_of_url(url)
    if file is not None:
        from tidemill.consensus.sqlite.client import SqliteConsensus

        if not create and not is_present(file):
            raise MissingError(f"consensus has no cluster: path={file} does not exist.")
        sqlite = SqliteConsensus(file, clock, rand)
        await sqlite.start()
        return sqlite
    if separator and scheme in ("postgresql", "postgres"):
        from tidemill.consensus.postgres.client import PostgresConsensus

        postgres = PostgresConsensus(url, clock, rand)
        await postgres.start(create=create)
        return postgres
    if separator and scheme == "memory" and not rest:
        from tidemill.consensus.memory import MemoryConsensus

        return MemoryConsensus(clock)
    raise InvalidError(f"unknown engine in the URL: consensus.url={without_credentials(url)!r}.", fix=FIX)


def sqlite_path_of_url(url: str) -> Path | None:
    """Return the database file of a `sqlite:` URL, None for any other URL. Raises InvalidError if it names no file."""
    scheme, separator, rest = url.partition(":")
    if not separator or scheme != "sqlite":
        return None
    host = rest.startswith("//") and not rest.startswith("///")
    path = "/" + rest.lstrip("/") if rest.startswith("/") else rest
    if host or not path or path.endswith("/"):
        raise InvalidError(f"no database file in the URL: consensus.url={without_credentials(url)!r}.", fix=FIX)
    return Path(path)
