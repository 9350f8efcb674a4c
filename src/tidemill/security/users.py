"""Users and their SCRAM credentials, stored as rows of the metastore (rows/security).

A credential is read at every authentication and never cached, so a changed password takes effect immediately on every
node. A name without a credential has a decoy, which is the same on every node: its salt is derived from the secret of
the cluster.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError
from tidemill.metastore.cached_rows import write_rows
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import USERS
from tidemill.metastore.rows.security import UserRow
from tidemill.security.principals import NAME_CHARS_MAX
from tidemill.security.scram import (
    ITERATIONS_MAX,
    ITERATIONS_MIN,
    NAMES,
    Credential,
    CredentialForm,
    decoy_credential,
    form_of,
)

_FIX: Final = "Check with `tidemill user list`."
ANY_MECHANISM: Final = 0
"""Mechanism of a password check: that of the strongest credential of the user."""
USERS_MAX: Final = 10_000
"""Limit of stored credentials in the cluster."""


def check_user(name: str) -> None:
    """Raise InvalidError if the name is empty, too long or not printable."""
    if not 0 < len(name) <= NAME_CHARS_MAX or any(not char.isprintable() for char in name):
        raise InvalidError(f"bad user name: user={name!r}.", fix=f"Use 1 to {NAME_CHARS_MAX} printable characters.")


def check_iterations(iterations: int) -> None:
    """Raise InvalidError if the count is outside ITERATIONS_MIN to ITERATIONS_MAX."""
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise InvalidError(
            f"bad number of iterations: iterations={iterations}.", fix=f"Use {ITERATIONS_MIN} to {ITERATIONS_MAX}."
        )


class Users:
    """Read and write credentials. Reads may raise UnavailableError; writes may also raise UnknownOutcomeError."""

    def __init__(self, metastore: Metastore, clock: Clock) -> None:
        self._metastore = metastore
        self._clock = clock
        self._rows: Sequence[UserRow] = ()
        self._reading = asyncio.Lock()
        """Held while forms are computed: after a change, many authentications need them at one time."""
        self._forms: dict[int, list[CredentialForm]] = {}
        """Forms of the credentials in `_rows` by mechanism; ANY_MECHANISM: of the strongest one of each user."""

    async def credential(self, user: str, mechanism: int) -> Credential | None:
        try:
            row = await self._metastore.get(USERS, user, mechanism)
        except InvalidError:
            return None  # the name cannot be encoded as a key
        return _credential(row) if row is not None else None

    async def decoy(self, user: str, mechanism: int = ANY_MECHANISM) -> Credential:
        """Return a credential that no password matches and that looks like a stored one (`scram.decoy_credential`)."""
        secret = await self._metastore.secret()
        async with self._reading:
            rows = await self._metastore.rows(USERS, fresh=False)
            if rows is not self._rows:
                self._rows, self._forms = rows, _forms_of(rows)
        return decoy_credential(user, mechanism, secret, self._forms.get(mechanism, ()))

    async def list(self) -> list[Credential]:
        """Return all credentials, ordered by user and mechanism."""
        return [_credential(row) for row in await self._metastore.rows(USERS)]

    async def put(self, credential: Credential) -> None:
        """Create or replace a credential. Raises InvalidError for a bad name or too many users."""
        await self.change(credential.user, [credential], [])

    async def delete(self, user: str, mechanisms: Sequence[int]) -> None:
        """Delete the user's credentials of these mechanisms. Missing ones are ignored."""
        await self.change(user, [], mechanisms)

    async def change(self, user: str, put: Sequence[Credential], deleted: Sequence[int]) -> None:
        """Apply all changes of one user atomically: create or replace the credentials `put`, delete those of the
        mechanisms `deleted`. Raises InvalidError as `put` does."""
        new = 0
        for credential in put:
            check_user(credential.user)
            check_iterations(credential.iterations)
            if credential.mechanism not in NAMES:
                raise InvalidError(f"no such mechanism: mechanism={credential.mechanism}.")
            new += await self.credential(credential.user, credential.mechanism) is None
        if new and len(await self.list()) + new > USERS_MAX:
            raise InvalidError(f"too many users: limit={USERS_MAX}.", fix="Delete unused users.")
        now_ms = self._clock.now_ms()
        rows = [
            USERS.encode(UserRow(c.user, c.mechanism, c.salt, c.stored_key, c.server_key, c.iterations, now_ms))
            for c in put
        ]
        rows += [(USERS.key(user, mechanism), b"") for mechanism in deleted]
        await write_rows(self._metastore, self._clock, rows, _FIX)


def _forms_of(rows: Iterable[UserRow]) -> dict[int, list[CredentialForm]]:
    """Return the forms by mechanism, in order. `rows` are ordered by user and mechanism."""
    found: dict[int, Counter[CredentialForm]] = {}
    strongest: dict[str, CredentialForm] = {}
    for row in rows:
        form = strongest[row.user] = form_of(row.mechanism, row.salt, row.iterations)
        found.setdefault(row.mechanism, Counter())[form] += 1
    found[ANY_MECHANISM] = Counter(strongest.values())
    return {
        mechanism: [form for form in sorted(counts) for _ in range(counts[form])] for mechanism, counts in found.items()
    }


def _credential(row: UserRow) -> Credential:
    return Credential(row.user, row.mechanism, row.salt, row.stored_key, row.server_key, row.iterations)
