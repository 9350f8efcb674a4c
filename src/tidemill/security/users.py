"""Users and their SCRAM credentials: rows of the metastore (rows/users).

US1  A credential is read anew at every authentication: a password that was changed counts at once, everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import USERS
from tidemill.metastore.rows.users import UserRow
from tidemill.security.principals import NAME_CHARS_MAX
from tidemill.security.retrying_write import write
from tidemill.security.scram import ITERATIONS_MAX, ITERATIONS_MIN, NAMES, Credential

_FIX: Final = "Look with: tidemill user list"
USERS_MAX: Final = 10_000
"""Credentials in all."""


def check_user(name: str) -> None:
    """Raises InvalidError."""
    if not 0 < len(name) <= NAME_CHARS_MAX or any(not char.isprintable() for char in name):
        raise InvalidError(f"bad user name: user={name!r}.", fix=f"Use 1 to {NAME_CHARS_MAX} printable characters.")


def check_iterations(iterations: int) -> None:
    """Raises InvalidError."""
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise InvalidError(
            f"bad number of iterations: iterations={iterations}.", fix=f"Use {ITERATIONS_MIN} to {ITERATIONS_MAX}."
        )


class Users:
    """Reads may raise Unavailable; writes Unknown besides."""

    def __init__(self, metastore: Metastore, clock: Clock) -> None:
        self._metastore = metastore
        self._clock = clock

    async def credential(self, user: str, mechanism: int) -> Credential | None:
        try:
            row = await self._metastore.get(USERS, user, mechanism)
        except InvalidError:
            return None  # a name that no key holds
        return _credential(row) if row is not None else None

    async def list(self) -> list[Credential]:
        """By user and mechanism."""
        return [_credential(row) for row in await self._metastore.rows(USERS)]

    async def put(self, credential: Credential) -> None:
        """Create or replace. Raises InvalidError for a bad name, too many users."""
        await self.change(credential.user, [credential], [])

    async def delete(self, user: str, mechanisms: Sequence[int]) -> None:
        """What is not there is left alone."""
        await self.change(user, [], mechanisms)

    async def change(self, user: str, put: Sequence[Credential], deleted: Sequence[int]) -> None:
        """All of it or nothing, of one user: credentials to create or replace, mechanisms to delete those of. Raises
        InvalidError as `put`."""
        new = 0
        for credential in put:
            check_user(credential.user)
            check_iterations(credential.iterations)
            if credential.mechanism not in NAMES:
                raise InvalidError(f"no such mechanism: mechanism={credential.mechanism}.")
            new += await self.credential(credential.user, credential.mechanism) is None
        if new and len(await self.list()) + new > USERS_MAX:
            raise InvalidError(f"too many users: limit={USERS_MAX}.", fix="Delete users that nobody uses.")
        now_ms = self._clock.now_ms()
        rows = [
            USERS.encode(UserRow(c.user, c.mechanism, c.salt, c.stored_key, c.server_key, c.iterations, now_ms))
            for c in put
        ]
        rows += [(USERS.key(user, mechanism), b"") for mechanism in deleted]
        await write(self._metastore, self._clock, rows, _FIX)


def _credential(row: UserRow) -> Credential:
    return Credential(row.user, row.mechanism, row.salt, row.stored_key, row.server_key, row.iterations)
