"""The few kinds of error that cross a room's boundary; each tells the caller what it may do.

`UnavailableError` and `UnknownOutcomeError` differ in one thing only, and it is the thing that matters: after
`UnavailableError` the operation certainly did not happen and may be retried; after `UnknownOutcomeError` it may
have happened, and the caller resolves it by nonce or by re-reading, or steps down. It never guesses.

Foreign exceptions are translated into these at the edge of the room that calls the library.
"""

from __future__ import annotations

import difflib
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
    """The request itself is wrong; it changed nothing and will fail again unless it is changed."""


class MissingError(InvalidError):
    """The named object, key, topic, shard or shape does not exist."""


class ConflictError(TidemillError):
    """Another writer was first. `current` holds what is there now, so the loser saves a round trip."""

    def __init__(self, message: str, *, current: object = None, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.current = current


class FencedError(TidemillError):
    """A newer term or epoch exists: this holder must stop writing and step down."""

    def __init__(self, message: str, *, current: object = None, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.current = current


class UnavailableError(TidemillError):
    """It did not happen; retrying later may succeed."""


class UnknownOutcomeError(TidemillError):
    """It may or may not have happened; resolve by nonce or re-read before doing anything else."""

    @property
    def kind(self) -> str:
        return "unknown"


class CorruptError(TidemillError):
    """Durable bytes are not what was written. Never retried, never papered over."""


class ClosedError(TidemillError):
    """The component was closed; the caller outlived it."""


class StoreRolledBackError(ClosedError):
    """A store returned to an earlier state: what this process holds in memory is of a history that is gone.

    The process must end; a new one continues from what exists. Never retried (`ends_process`).
    """


class ClusterReplacedError(ClosedError):
    """The bucket belongs to another cluster: this process must end and stay down. Never retried (`ends_process`)."""


def ends_process(error: BaseException) -> bool:
    """True for errors that mean "stop": no loop may retry them, the process ends with them."""
    return isinstance(error, StoreRolledBackError | ClusterReplacedError)


def as_unavailable(error: TidemillError) -> UnavailableError:
    """The same words as Unavailable: what was right when it was opened and is wrong now may be mended, so that it is
    waited for, and told, instead of ending whoever met it."""
    return UnavailableError(error.message, fix=error.fix)


def nearest(name: str, known: Iterable[str]) -> str:
    """Of names that are known, the one that was probably meant; "" where none is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), 1)), "")


def unknown_name(name: str, known: Iterable[str]) -> str:
    """The `fix` of an error that tells of an unknown name."""
    have = list(known)
    near = nearest(name, have)
    return f"{f'Did you mean {near}? ' if near else ''}Known are {', '.join(have)}."
