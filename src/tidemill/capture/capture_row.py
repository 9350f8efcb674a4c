"""A capture's row in the catalogue, changed by the session that captures now and by no earlier one.

N1  A session claims the row before it changes it: `epoch` grows. Each of its changes is a compare-and-set on that
    epoch, so what a superseded one still writes (its process was frozen, its request was on its way) is refused, and
    takes nothing back that its successor wrote: above all the names of those who saw what was confirmed (taps.py, X6).
N2  The row is read, the connection that has the capture's lock answers once more, the row is claimed. A session that
    got the lock in between has either claimed it first, and this claim is refused; or it reads the row after that.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from tidemill.base.errors import UnavailableError
from tidemill.metastore.catalogue import CaptureRow, Catalogue

NO_ROW = -1


class FencedCaptureRow:
    """Raises from every method what the catalogue raises: after Unknown a change may have been made, and may be made
    again."""

    def __init__(self, catalogue: Catalogue, name: str) -> None:
        self._catalogue = catalogue
        self._name = name
        self._epoch = NO_ROW
        self._row: CaptureRow | None = None
        self.session = ""
        """Written with every change: whose connections a successor is to end (session_lock.py)."""

    @property
    def row(self) -> CaptureRow | None:
        """As it was read, or written last."""
        return self._row

    @property
    def now(self) -> CaptureRow:
        """… of a capture that has one."""
        assert self._row is not None
        return self._row

    async def read(self) -> CaptureRow | None:
        self._row = await self._catalogue.get(CaptureRow, self._name)
        self._epoch = self._row.epoch if self._row is not None else NO_ROW
        return self._row

    async def claim(self) -> CaptureRow:
        """Of a row that was read, and is there (N2). Raises UnavailableError when another session has claimed it
        since."""
        row = await self.change(lambda found: replace(found, epoch=found.epoch + 1))
        self._epoch = row.epoch
        return row

    async def begin(self, row: CaptureRow) -> CaptureRow:
        """In place of whatever it was. Raises as `claim`."""
        row = await self._change(lambda found: replace(row, epoch=found.epoch if found is not None else 0))
        self._epoch = row.epoch
        return row

    async def change(self, change: Callable[[CaptureRow], CaptureRow]) -> CaptureRow:
        """`change` may be called again. Raises UnavailableError when another session has claimed the row (N1)."""
        return await self._change(change)  # type: ignore[arg-type]

    async def _change(self, change: Callable[[CaptureRow | None], CaptureRow]) -> CaptureRow:
        def mine(found: CaptureRow | None) -> CaptureRow:
            epoch = found.epoch if found is not None else NO_ROW
            if epoch != self._epoch:
                raise UnavailableError(
                    f"another session has taken this capture over, or it was dropped: capture={self._name}"
                    f" epoch={epoch} own={self._epoch}."
                )
            return replace(change(found), session=self.session)

        self._row = row = await self._catalogue.change_capture(self._name, mine)
        return row
