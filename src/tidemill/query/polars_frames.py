"""Tables as Polars frames; Polars is an optional dependency."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tidemill.base.errors import InvalidError
from tidemill.base.runtime.blocking_portal import SyncContext
from tidemill.query.table_read import ReadSelection

if TYPE_CHECKING:
    import polars as pl

    from tidemill.query.table import Table


def import_polars() -> Any:
    """Import Polars. Raises InvalidError if it is not installed."""
    try:
        import polars
    except ImportError as error:
        raise InvalidError("polars is not installed.", fix='Install it: pip install "tidemill[polars]".') from error
    return polars


def lazy_frame(table: Table, found: SyncContext[ReadSelection]) -> pl.LazyFrame:
    """Return a frame of the chosen contents. Polars references the source while a frame may read it, and so the
    hold."""
    module = import_polars()
    from polars.io.plugins import register_io_source

    def source(
        columns: list[str] | None, predicate: pl.Expr | None, rows: int | None, batch_rows: int | None
    ) -> Iterator[pl.DataFrame]:
        """Yield the rows of a Polars IO source; `batch_rows` is only a hint."""
        names = schema.names() if columns is None else columns or schema.names()[:1]
        used = [] if predicate is None else predicate.meta.root_names()
        left = rows
        read = list(dict.fromkeys([*names, *used]))
        types = {name: schema[name] for name in read}  # the table's types may have been widened since
        for batch in table._stream_chosen(found, read, None, end=lambda: None):
            frame = module.from_arrow(batch).cast(types)
            if predicate is not None:
                frame = frame.filter(predicate).select(names)
            if left is not None:
                frame, left = frame.head(left), left - min(left, frame.height)
            yield frame
            if left == 0:
                return

    schema = module.from_arrow(table.schema.empty_table()).schema
    frame: pl.LazyFrame = register_io_source(source, schema=schema, validate_schema=False, is_pure=True)
    return frame
