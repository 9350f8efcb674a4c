"""Lifecycle of one open database: its mode, and whether it has ended.

    writable     the one writer of its epoch
    read_only    files only; `Database.refresh` switches to a newer manifest
    follower     read-only files, and batches from the replicated log on top of them; never flushes

    open ─► ended, with ClosedError, or the UnknownOutcomeError or FencedError of a manifest write

Invariant (one end): the first error that ends a database is its end for all callers, and it is never open again.
"""

from __future__ import annotations

from tidemill.base.errors import InvalidError, TidemillError


class Lifecycle:
    """Lifecycle of a database. At most one of `read_only` and `follower` is set."""

    def __init__(self, domain_uuid: str, *, read_only: bool, follower: bool) -> None:
        self.read_only = read_only or follower
        """True if the database writes no files: it is opened read-only or follows."""
        self.follower = follower
        self.accepts_batches = follower or not read_only
        """True until the database ends, if it is writable or follows."""
        self._domain_uuid = domain_uuid
        self._ended: TidemillError | None = None

    @property
    def end_reason(self) -> TidemillError | None:
        """Reason why every call raises: ClosedError, UnknownOutcomeError or FencedError; None while the database is
        open.
        """
        return self._ended

    def end(self, error: TidemillError) -> bool:
        """End with this error; return False if the database has ended before."""
        if self._ended is not None:
            return False
        self._ended = error
        self.accepts_batches = False
        return True

    def check_open(self) -> None:
        """Raise if the database has ended."""
        if self._ended is not None:
            raise copy_of_error(self._ended)

    def check_writable(self) -> None:
        """Raise InvalidError unless this is the writer, and the end of a database that has ended."""
        self.check_open()
        if self.read_only:
            raise InvalidError(f"the database is read-only: domain_uuid={self._domain_uuid}.")

    def check_read_only(self) -> None:
        """Raise InvalidError if this is the writer, and the end of a database that has ended."""
        self.check_open()
        if not self.read_only:
            raise InvalidError(
                f"a writable database cannot switch to another manifest: domain_uuid={self._domain_uuid}."
            )


def copy_of_error(error: TidemillError) -> TidemillError:
    """Return a copy: raising one instance repeatedly would accumulate tracebacks."""
    copy = type(error)(error.message, fix=error.fix)
    copy.__cause__ = error.__cause__
    return copy
