"""Pin: a view that does not change until it is released. The newest layer gets no more rows, and the version's files
are not deleted.
"""

from __future__ import annotations

from collections.abc import Callable

from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.read_view import View
from tidemill.metastore.lsm.version_set import VersionSet


class Pin:
    """Pinned view. Created and released synchronously. `check` raises if the database may not be read any more."""

    __slots__ = ("_released", "_versions", "check", "options", "view")

    def __init__(self, view: View, versions: VersionSet, options: Options, check: Callable[[], None]) -> None:
        self.view = view
        self.options = options
        self.check = check
        self._versions = versions
        self._released = False
        if view.layers:
            view.layers[0].pins += 1
        versions.pin(view.version)

    def duplicate(self) -> Pin:
        """Return another pin of the same view."""
        return Pin(self.view, self._versions, self.options, self.check)

    def release(self) -> None:
        """Release the pin. Idempotent."""
        if not self._released:
            self._released = True
            if self.view.layers:
                self.view.layers[0].pins -= 1
            self._versions.unpin(self.view.version)

    @property
    def released(self) -> bool:
        return self._released
