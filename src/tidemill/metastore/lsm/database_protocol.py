"""Interface of the database for flushes and write stalls, to avoid a cyclic dependency."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import TidemillError
from tidemill.metastore.lsm.file_store import FileName, SstFiles
from tidemill.metastore.lsm.memtable import Memtable
from tidemill.metastore.lsm.notifier import Notifier
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.version import Edit, Version


class DatabaseProtocol(Protocol):
    """Part of `Database` that they use. They change its attributes only through these methods."""

    domain_uuid: str
    options: Options
    clock: Clock
    rand: Rand
    files: SstFiles
    memtable: Memtable
    wake: Notifier
    read_only: bool
    compacts: bool
    max_applied_seqno: int
    failure: BaseException | None

    @property
    def max_persisted_seqno(self) -> int: ...
    @property
    def buffer_is_full(self) -> bool: ...
    @property
    def version(self) -> Version: ...
    @property
    def end_reason(self) -> TidemillError | None: ...
    @property
    def background_error(self) -> object:
        """Error of the last flush or compaction; falsy if neither failed."""
        ...

    def check_open(self) -> None: ...
    async def commit_edit(self, edit: Edit, installed: Callable[[], None] | None = None) -> None: ...
    def next_file_name(self) -> FileName: ...
    def release_file_names(self, names: Iterable[FileName]) -> None: ...
