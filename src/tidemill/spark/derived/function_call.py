"""Call of a derived function: its result for the inputs' rows at one time, by the cheapest way that is exact.

few rows     all rows are in the driver: a prepared plan computes them, or frames of local rows without such a plan
otherwise    Spark reads the inputs that are given whole
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import structlog

from tidemill.base.errors import TidemillError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.parts.row_hash import U64
from tidemill.spark.definition import DerivedTable
from tidemill.spark.derived.function_result import is_frame, not_a_frame_error
from tidemill.spark.derived.inputs import DerivedInput, GroupedInput
from tidemill.spark.derived.prepared_plan import SMALL_BYTES, JobRanError, NotPreparedError, PreparedPlan, small_session
from tidemill.spark.stores import Stores
from tidemill.spark.types import local_frame, spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

PREPARED_S = 300.0
"""Time after which a plan is made again: the function may depend on more than its inputs, such as today's date."""

log = structlog.get_logger()


class FunctionFailedError(TidemillError):
    """The user's function, or the plan that it returned, raised."""


class FunctionCall:
    """Calls of one derived table's function, by one thread."""

    def __init__(self, portal: BlockingPortal, stores: Stores, spark: SparkSession, table: DerivedTable) -> None:
        self.no_plan: dict[str, str] = {}
        """Input → the last logged reason why the data source reads it."""
        self.not_prepared = ""
        """Reason why the function has no prepared plan, or ""."""
        self._portal = portal
        self._stores = stores
        self._spark = spark
        self._table = table
        self._small: SparkSession | None = None
        """Copy of the session for prepared plans; one, because each copy has files in the JVM."""
        self._prepared: PreparedPlan | None = None
        self._prepared_until_s: float | None = None
        """Time of the next preparation; None = in the next round of few rows."""

    def result_schema(self, inputs: Sequence[DerivedInput]) -> StructType:
        """Return the schema of the result, by a call on empty inputs, which may be new. Raises FunctionFailedError."""
        self._prepared, self._prepared_until_s = None, None
        frames = [self._spark.createDataFrame([], _schema_of(one)) for one in inputs]
        found: StructType = self._call(frames, lambda result: result.schema)
        return found

    def result(self, inputs: Sequence[DerivedInput], at: int, groups: U64 | None) -> pa.Table:
        """Return the result at a final time from the rows of these groups (None = all), while the inputs are held.

        Raises FunctionFailedError, InvalidError (the result is no DataFrame), and as reading.
        """
        rows = [self._rows(one, at, groups) for one in inputs]
        few = [one for one in rows if one is not None]
        if len(few) == len(rows) and sum(one.nbytes for one in few) <= SMALL_BYTES:
            plan = self._prepare(inputs)
            if plan is not None:
                try:
                    return plan.run(few)
                except Exception as error:  # of py4j and Spark; the ordinary way succeeds, or reports its failure
                    self._prepared = None
                    self._report_unprepared(f"it failed: {_first_line(error)}")
        frames = [
            self._frame(one, at) if given is None else local_frame(self._spark, given, _schema_of(one))
            for one, given in zip(inputs, rows, strict=True)
        ]
        found: pa.Table = self._call(frames, lambda result: result.toArrow())
        return found

    def _rows(self, one: DerivedInput, at: int, groups: U64 | None) -> pa.Table | None:
        """Return the rows that the function gets of an input; None if Spark has to read them."""
        if groups is not None and isinstance(one, GroupedInput):
            return one.rows_of(groups)
        return one.small_contents(at)

    def _prepare(self, inputs: Sequence[DerivedInput]) -> PreparedPlan | None:
        now_s = self._stores.clock.monotonic_s()
        if self._prepared_until_s is not None and now_s < self._prepared_until_s:
            return self._prepared
        self._prepared, self._prepared_until_s = None, now_s + PREPARED_S
        try:
            self._small = self._small or small_session(self._spark)
            schemas = [_schema_of(one) for one in inputs]
            self._prepared = PreparedPlan(self._spark, self._small, self._table.function, schemas)
            self.not_prepared = ""
        except JobRanError as why:  # perhaps another thread's
            self._prepared_until_s = now_s + PREPARED_S / 30
            self._report_unprepared(str(why))
        except NotPreparedError as why:
            self._report_unprepared(str(why))
        except Exception as error:  # the function is the user's, and needs rows; the ordinary call reports its failures
            self._report_unprepared(f"the function cannot be called without rows: {_first_line(error)}")
        return self._prepared

    def _report_unprepared(self, because: str) -> None:
        if because != self.not_prepared:
            log.info("the plan is made in each round", table=self._table.name, because=because)
            self.not_prepared = because

    def _frame(self, one: DerivedInput, at: int) -> DataFrame:
        """Return all rows of an input, natively read by Spark if possible."""
        from tidemill.spark.table_reader import frame_at

        s, name = self._stores, one.shard.name
        where = {key: url for key, url in (("objects", s.urls.objects), ("consensus", s.urls.consensus)) if url}
        frame, because = frame_at(self._spark, self._portal, s, one.shard, at, where, again=True)
        if because and because != self.no_plan.get(name):
            log.warning("read through the data source", table=self._table.name, shard=name, because=because)
            self.no_plan[name] = because
        return frame

    def _call(self, frames: Sequence[Any], then: Callable[[Any], Any]) -> Any:
        """Call the user's function on the frames; Spark is lazy, so `then` may run it. Raises FunctionFailedError."""
        name = self._table.name
        try:
            result = self._table.function(self._spark, *frames)
            if is_frame(result):
                return then(result)
        except BaseException as error:  # the function is the user's: any exception is reported and retried
            raise FunctionFailedError(f"derived function raised: table={name} {_first_line(error)}") from error
        raise not_a_frame_error(name, result)


def _schema_of(one: DerivedInput) -> StructType:
    return spark_schema(one.shard.schema.columns)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}".rstrip(": ")
