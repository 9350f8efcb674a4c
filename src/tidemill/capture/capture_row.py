"""The catalogue row of a capture, changed only by the current session and by no earlier one.

Invariant (fencing): a session claims the row before it changes it, which raises `epoch`. Each of its changes is a
compare-and-set on that epoch. So a late write of a superseded session (its process was frozen, its request was in
flight) is rejected and reverts nothing that its successor wrote. Most important are the names of the taps that have
received everything that is confirmed (consumers.py).

Invariant (claim under the lock): the row is read, then the connection that holds the capture's lock answers again, then
the row is claimed. A session that got the lock in between has either claimed first, and this claim is rejected, or it
reads the row after this claim.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from tidemill.base.errors import UnavailableError
from tidemill.metastore.catalogue import CaptureRow, Catalogue

NO_ROW_EPOCH = -1


class FencedCaptureRow:
    """The row, fenced by its epoch. Every method raises the errors of the catalogue. After an unknown outcome a change
    may have been made, and may be retried.
    """

    def __init__(self, catalogue: Catalogue, name: str) -> None:
        self._catalogue = catalogue
        self._name = name
        self._epoch = NO_ROW_EPOCH
        self._row: CaptureRow | None = None
        self.session = ""
        """Written with every change; a successor uses it to end the connections of this session (session_lock.py)."""

    @property
    def row(self) -> CaptureRow | None:
        """The row as last read or written."""
        return self._row

    @property
    def current(self) -> CaptureRow:
        """The row of a capture that has one."""
        assert self._row is not None
        return self._row

    async def read(self) -> CaptureRow | None:
        self._row = await self._catalogue.get(CaptureRow, self._name)
        self._epoch = self._row.epoch if self._row is not None else NO_ROW_EPOCH
        return self._row

    async def claim(self) -> CaptureRow:
        """Claim a row that was read and exists. Raises UnavailableError if another session has claimed it since."""
        row = await self.update(lambda found: replace(found, epoch=found.epoch + 1))
        self._epoch = row.epoch
        return row

    async def replace_row(self, row: CaptureRow) -> CaptureRow:
        """Replace the row, whether or not it exists. Raises UnavailableError as `claim` does."""
        row = await self._update_if_current(lambda found: replace(row, epoch=found.epoch if found is not None else 0))
        self._epoch = row.epoch
        return row

    async def update(self, change: Callable[[CaptureRow], CaptureRow]) -> CaptureRow:
        """Apply `update`, which may be called more than once. Raises UnavailableError if another session has claimed
        the row.
        """
        return await self._update_if_current(change)  # type: ignore[arg-type]

    async def _update_if_current(self, change: Callable[[CaptureRow | None], CaptureRow]) -> CaptureRow:
        def apply_if_current(found: CaptureRow | None) -> CaptureRow:
            epoch = found.epoch if found is not None else NO_ROW_EPOCH
            if epoch != self._epoch:
                raise UnavailableError(
                    f"another session has taken this capture over, or it was dropped: capture={self._name}"
                    f" epoch={epoch} own={self._epoch}."
                )
            return replace(change(found), session=self.session)

        self._row = row = await self._catalogue.change_capture(self._name, apply_if_current)
        return row
