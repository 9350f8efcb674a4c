"""A table at one time as a Polars LazyFrame (Polars is an optional dependency).

    settled parts in a directory   Polars' own Parquet scan of each file, with the query's columns and filter, without
                                   the rows of its deletion vector
    anything else                  the rows that `Table.to_batches` returns

Polars asks the source of a frame for rows when the query runs, and references the source as long as a frame may read
it, and so the hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tidemill.base.errors import MissingError
from tidemill.base.libraries import require
from tidemill.base.runtime.blocking_portal import SyncContext
from tidemill.objects.factory import local_directory
from tidemill.query.table_read import ReadSelection, plan_read
from tidemill.query.verified_paths import verified_path
from tidemill.shards.read.deletion_vectors import deletion_vectors
from tidemill.shards.read.part_reader import fetch_through

if TYPE_CHECKING:
    import polars as pl

    from tidemill.query.table import Table


def import_polars() -> Any:
    """Import Polars. Raises InvalidError if it is not installed."""
    require("polars")
    import polars

    return polars


def lazy_frame(table: Table, found: SyncContext[ReadSelection]) -> pl.LazyFrame:
    """Return a frame of the chosen contents, which are held as long as a frame may read them."""
    module = import_polars()
    from polars.io.plugins import register_io_source

    def source(
        columns: list[str] | None, predicate: pl.Expr | None, rows: int | None, batch_rows: int | None
    ) -> Iterator[pl.DataFrame]:
        """Yield the rows of a Polars IO source; `batch_rows` is only a hint."""
        names = schema.names() if columns is None else columns or schema.names()[:1]
        used = [] if predicate is None else predicate.meta.root_names()
        read = list(dict.fromkeys([*names, *used]))
        types = {name: schema[name] for name in read}  # the table's types may have been widened since
        left = rows
        for piece in _pieces(module, table, found, read):
            lazy = piece.cast(types)
            if predicate is not None:
                lazy = lazy.filter(predicate)
            lazy = lazy.select(names)
            try:
                frame = (lazy if left is None else lazy.head(left)).collect()
            except FileNotFoundError as error:  # Polars opens files itself; the hold of a paused process has lapsed
                missing = MissingError(f"a part is missing: {error}.")
                raise table._portal.call(table._shard.explain_missing(missing, found.value.batches)) from error
            if left is not None:
                left -= frame.height
            yield frame
            if left == 0:
                return

    schema = module.from_arrow(table.schema.empty_table()).schema
    frame: pl.LazyFrame = register_io_source(source, schema=schema, validate_schema=False, is_pure=True)
    return frame


def _pieces(module: Any, table: Table, found: SyncContext[ReadSelection], columns: list[str]) -> Iterator[pl.LazyFrame]:
    """Yield `columns` of all rows of the chosen contents, in several frames."""
    directory = local_directory(table._stores.urls.objects)
    shard, portal, objects = table._shard, table._portal, table._stores.objects
    if directory is not None:
        try:
            plan = plan_read(portal, objects, shard, found.value)
            if plan is not None:
                vectors = deletion_vectors(plan, shard.schema, fetch_through(portal, objects, whole=False))
                for part in plan.settled:
                    path = verified_path(portal, objects, directory, part)
                    yield _scan_file(module, path, vectors.get(part.object_key)).select(columns)
                yield module.from_arrow(plan.live.select(columns)).lazy()
                return
        except MissingError as error:
            raise portal.call(shard.explain_missing(error, found.value.batches)) from error
    for batch in table._stream_chosen(found, columns, None, end=lambda: None):
        yield module.from_arrow(batch).lazy()


def _scan_file(module: Any, path: str, deleted: Any) -> pl.LazyFrame:
    scanned: pl.LazyFrame = module.scan_parquet(path, glob=False)
    if deleted is None:
        return scanned
    row_index = max(scanned.collect_schema().names(), key=len) + "_"  # longer than every name, so unlike all of them
    without = module.DataFrame({row_index: deleted}, schema={row_index: module.get_index_type()}).lazy()
    return scanned.with_row_index(row_index).join(without, on=row_index, how="anti")
