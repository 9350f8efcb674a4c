"""Prepared plan: the physical plan of a derived function, made once and run with the rows of each small round.

Spark spends most of a small round on analysing, optimising and planning the function's DataFrame, and little on rows.

    function(frames of unknown rows) ─► physical plan
    each round:  rows ─► LocalTableScan in place of each unknown leaf ─► one job, of one task if nothing shuffles

Invariant (unknown rows): the plan may depend on the function and on the inputs' columns, never on rows. The rows of the
frames raise an error if a job reads them, and Spark's optimizer sees an RDD. A function that runs a job while it is
called is not prepared. Neither is a plan with an operator or an expression that stores a value of an earlier run: the
time, a random number, a subquery, a reused exchange, Python, or a leaf that is not an input.

Spark Connect and a Spark without these internals use the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidemill.base.limits import MIB
from tidemill.spark.derived.function_result import is_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

SMALL_BYTES = 4 * MIB
"""Limit for the rows of all inputs in memory: one task computes them."""
SMALL_SETTINGS = {
    # Frames have one partition, and nothing shuffles: a round is one task.
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.leafNodeDefaultParallelism": "1",
    "spark.sql.maxSinglePartitionBytes": "1t",
    # A broadcast is an additional job. The size of an RDD is unknown, and would count as infinite.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.defaultSizeInBytes": "1m",
    # Spark writes the code of a plan's copy again, though it is compiled once: more work than to interpret few rows.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # Both store results of an earlier run.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.exchange.reuse": "false",
}
REUSABLE_OPERATORS = frozenset(
    f"{name}Exec"
    for name in (
        *("WholeStageCodegen", "Project", "Filter", "Coalesce", "Union", "Expand", "Generate", "RDDScan"),
        *("HashAggregate", "ObjectHashAggregate", "SortAggregate", "Sort", "Window", "WindowGroupLimit"),
        *("SortMergeJoin", "ShuffledHashJoin", "CartesianProduct", "ShuffleExchange"),
        *("TakeOrderedAndProject", "GlobalLimit", "LocalLimit"),
    )
) | {"InputAdapter"}
"""Physical operators whose copies store nothing of the original's run, and which start no job of their own: it would
run without the session's settings."""
STORED_EXPRESSIONS = ("CURRENT_LIKE", "PLAN_EXPRESSION", "PYTHON_UDF")
"""Tree patterns of expressions whose value is determined when the plan is made, or that Python computes."""
UNKNOWN = "the rows of an input are unknown when the plan of a derived table is made"


class NotPreparedError(Exception):
    """The function cannot be prepared; the message is the reason."""


class JobRanError(NotPreparedError):
    """A job ran while the function was called: its own, or another thread's."""


class PreparedPlan:
    """Plan of one function. `run` may be called by one thread at a time."""

    def __init__(
        self, spark: SparkSession, small: SparkSession, function: Callable[..., Any], schemas: Sequence[StructType]
    ) -> None:
        """Call the function on frames of unknown rows in `small`, which is `spark`'s `small_session`.

        Raises NotPreparedError, and what the function raises.
        """
        from pyspark.sql import SparkSession

        session: Any = small
        self._session = small
        self._jvm: Any = session._jvm
        self._jsession: Any = session._jsparkSession
        self._jcaller: Any = spark._jsparkSession
        self._sessions: Any = SparkSession._get_j_spark_session_class(self._jvm)
        # Every look-up of a class is a call of the JVM for each part of its name.
        self._collections = self._jvm.scala.jdk.javaapi.CollectionConverters
        self._identity_map = self._jvm.java.util.IdentityHashMap
        self._inputs = [_UnknownInput(session, schema, self._leaves) for schema in schemas]
        scheduler = session._jsc.sc().dagScheduler()
        jobs = scheduler.numTotalJobs()
        result = function(session, *(one.frame for one in self._inputs))
        if not is_frame(result) or not hasattr(result, "_jdf"):
            raise NotPreparedError("the function returned no classic DataFrame")
        self._result: Any = result._jdf
        self._physical: Any = self._checked_plan()
        if scheduler.numTotalJobs() != jobs:
            raise JobRanError("a job ran while the function was called")
        self._places = self._input_leaves()
        self._omit_unused_columns()
        self._schema, self._jschema = result.schema, self._result.schema()

    def run(self, rows: Sequence[pa.Table]) -> pa.Table:
        """Return the function's result for these rows of the inputs. Raises Spark's exceptions."""
        from pyspark.sql import DataFrame

        self._sessions.setActiveSession(self._jsession)  # of this thread, which copies of operators refer to
        try:
            data = [one.local_rows(table) for one, table in zip(self._inputs, rows, strict=True)]
            replaced = self._identity_map()
            for leaf, output, place in self._places:
                replaced.put(leaf, self._inputs[place].scan(output, data[place]))
            # A Map is a PartialFunction. All leaves are replaced, so no operator of an earlier run remains.
            plan = self._physical.transformDown(self._collections.asScala(replaced))
            rdd = self._jsession.internalCreateDataFrame(plan.execute(), self._jschema, False)
            computed: Any = DataFrame(rdd, self._session)
            computed._schema = self._schema  # else the JVM is asked for it
            found: pa.Table = computed.toArrow()
        finally:
            self._sessions.setActiveSession(self._jcaller)
        return found

    def _leaves(self, plan: Any) -> list[Any]:
        return list(self._collections.asJava(plan.collectLeaves()))

    def _checked_plan(self) -> Any:
        """Return the physical plan. Raises NotPreparedError if a copy of it might compute something else."""
        execution = self._result.queryExecution()
        logical = execution.analyzed()
        patterns = self._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
        if not logical.deterministic():
            raise NotPreparedError("its result is not deterministic")
        if found := [one for one in STORED_EXPRESSIONS if logical.containsPattern(getattr(patterns, one)())]:
            raise NotPreparedError(f"it has expressions of kind {found[0]}")
        plan = execution.executedPlan()
        for operator in self._operators(plan):
            if (name := operator.getClass().getSimpleName()) not in REUSABLE_OPERATORS:
                raise NotPreparedError(f"its plan has the operator {name}")
            if name == "ShuffleExchangeExec" and "range" in operator.outputPartitioning().toString():
                raise NotPreparedError("it sorts rows of several partitions")  # a job samples them
        return plan

    def _operators(self, plan: Any) -> list[Any]:
        found, waiting = [], [plan]
        while waiting:
            found.append(waiting.pop())
            waiting.extend(self._collections.asJava(found[-1].children()))
        return found

    def _input_leaves(self) -> list[tuple[Any, Any, int]]:
        """Return (leaf, its attributes, place of its input). A leaf may occur twice, as in a join with itself."""
        found = []
        for leaf in self._leaves(self._physical):
            place = next((n for n, one in enumerate(self._inputs) if one.rows.equals(leaf.rdd())), None)
            if place is None:
                raise NotPreparedError("it reads rows that are not an input's")
            output = leaf.output()
            if output.size() != len(self._inputs[place].schema.fields):
                raise NotPreparedError("its plan reads some columns of an input's rows only")
            found.append((leaf, output, place))
        return found

    def _omit_unused_columns(self) -> None:
        """Find the columns of the inputs that no operator refers to, by the ids of their attributes."""
        used = [self._physical.outputSet()]
        for operator in self._operators(self._physical):
            if operator.nodeName() == "Union":  # it reads its children by position
                used.extend(child.outputSet() for child in self._collections.asJava(operator.children()))
            used.append(operator.references())
        for _, output, place in self._places:
            for column, attribute in enumerate(self._collections.asJava(output)):
                if any(found.contains(attribute) for found in used):
                    self._inputs[place].used.add(column)


class _UnknownInput:
    """Input whose rows are unknown: a frame that plans, and fails when a job reads it."""

    def __init__(self, session: SparkSession, schema: StructType, leaves: Callable[[Any], list[Any]]) -> None:
        from pyspark.sql import DataFrame
        from pyspark.sql.functions import lit, raise_error
        from pyspark.sql.pandas.types import to_arrow_schema

        self.schema = schema
        self.used: set[int] = set()
        """Places of the columns whose values matter; the others are passed as nulls."""
        jvm: Any = session._jvm
        self._jsession: Any = session._jsparkSession
        self._list, self._sql = jvm.java.util.ArrayList, jvm.PythonSQLUtils
        self._collections = jvm.scala.jdk.javaapi.CollectionConverters
        self._json = schema.json()
        self._arrow = to_arrow_schema(schema, timezone="UTC")
        # createDataFrame would make this the active session of the whole process.
        nothing = self._local_frame(pa.RecordBatch.from_pylist([], schema=self._arrow))
        (scan,) = leaves(nothing.queryExecution().sparkPlan())
        if scan.nodeName() != "LocalTableScan":
            raise NotPreparedError(f"rows of the driver are a {scan.nodeName()}")
        self._scan = scan
        self._rest = [scan.productElement(place) for place in range(2, scan.productArity())]
        failing: Any = session.range(1).select(raise_error(lit(UNKNOWN)).cast("string"))
        self.rows = failing._jdf.queryExecution().toRdd()
        unknown = self._jsession.internalCreateDataFrame(self.rows, nothing.schema(), False)
        self.frame: DataFrame = DataFrame(unknown, session).coalesce(1)

    def local_rows(self, table: pa.Table) -> Any:
        """Return the rows in the JVM, as the optimised createDataFrame creates them."""
        columns = [
            table.column(place) if place in self.used else pa.nulls(table.num_rows, field.type)
            for place, field in enumerate(self._arrow)
        ]
        rows = pa.Table.from_arrays(columns, table.column_names).cast(self._arrow).combine_chunks()
        return self._local_frame(*rows.to_batches()).queryExecution().analyzed().data()

    def _local_frame(self, *batches: pa.RecordBatch) -> Any:
        encoded = self._list()
        for batch in batches:
            encoded.add(batch.serialize().to_pybytes())
        return self._sql.toDataFrame(self._collections.asScala(encoded.iterator()), self._json, self._jsession)

    def scan(self, output: Any, rows: Any) -> Any:
        """Return the physical operator that reads these rows, with the attributes of the leaf that it replaces."""
        return self._scan.copy(output, rows, *self._rest)


def small_session(spark: SparkSession) -> SparkSession:
    """Return a copy of the session with the settings of small rounds. Raises NotPreparedError."""
    from pyspark.sql import SparkSession

    if not hasattr(spark, "_jsparkSession"):
        raise NotPreparedError("the session is not a classic one")
    classic: Any = spark
    session = SparkSession(classic.sparkContext, classic._jsparkSession.cloneSession())
    for setting, value in SMALL_SETTINGS.items():
        session.conf.set(setting, value)
    return session
