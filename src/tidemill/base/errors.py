"""The few kinds of errors that cross a package's boundary; each states what the caller may do.

`UnavailableError` and `UnknownOutcomeError` differ in one important way. After `UnavailableError` the operation
certainly did not happen and may be retried. After `UnknownOutcomeError` it may have happened, and the caller resolves
it by nonce or by re-reading, or steps down. It never guesses.

Exceptions of libraries are translated into these at the edge of the package that calls the library.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable


class TidemillError(Exception):
    """Root of all errors raised on purpose. `fix` is one imperative sentence for the operator, or empty."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} {self.fix}".rstrip() if self.fix else self.message

    @property
    def kind(self) -> str:
        """The name of the class without `Error`, in lower case: a label of metrics."""
        return type(self).__name__.removesuffix("Error").lower()


class InvalidError(TidemillError):
    """The request itself is wrong. It changed nothing and fails again unless it is changed."""


class MissingError(InvalidError):
    """The named object, key, topic, shard or shape does not exist."""


class ConflictError(TidemillError):
    """Another writer was first. `current` has the current state, which saves the loser a round trip."""

    def __init__(self, message: str, *, current: object = None, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.current = current


class FencedError(TidemillError):
    """A newer term or epoch exists: this holder must stop writing and step down."""

    def __init__(self, message: str, *, current: object = None, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.current = current


class UnavailableError(TidemillError):
    """The operation did not happen; retrying later may succeed."""


class UnknownOutcomeError(TidemillError):
    """The operation may have happened; resolve it by nonce or re-read before anything else."""

    @property
    def kind(self) -> str:
        return "unknown"


class CorruptError(TidemillError):
    """Stored bytes are not those that were written. Never retried, never hidden."""


class ClosedError(TidemillError):
    """The component was closed before the call."""


class StoreRolledBackError(ClosedError):
    """A store returned to an earlier state: the state in this process's memory belongs to a history that is lost.

    The process must end; a new one continues from the stored state. Never retried (`ends_process`).
    """


class ClusterReplacedError(ClosedError):
    """The bucket belongs to another cluster: this process must end and not be restarted.

    Never retried (`ends_process`).
    """


def ends_process(error: BaseException) -> bool:
    """True for errors after which the process must end: no loop may retry them."""
    return isinstance(error, StoreRolledBackError | ClusterReplacedError)


def to_unavailable(error: TidemillError) -> UnavailableError:
    """Return the error as UnavailableError with the same text.

    A configuration that was valid at the start and is not now may be repaired, so the caller retries and reports it
    instead of ending.
    """
    return UnavailableError(error.message, fix=error.fix)


AS_RETAINED = "as far as retention still has its records"
"""Limit of the re-creation of a topic's table: it begins at the topic's log start."""


def drop_table_command(table: str) -> str:
    """Return the command that deletes a table so that its pipeline re-creates it, as a shell takes it. A `fix` ends
    with it. The pipeline counts as a user of the table also while it is stopped, hence --force."""
    return f"tidemill table drop {shlex.quote(table)} --force"


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the known name that was probably meant, or "" if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), 1)), "")


def unknown_name_fix(name: str, known: Iterable[str]) -> str:
    """Return the `fix` of an error about an unknown name."""
    have = list(known)
    near = nearest_name(name, have)
    return f"{f'Did you mean {near}? ' if near else ''}Known are {', '.join(have)}."
