"""Declarations of a pipeline file: the tables, and the source of each. The driver carries them out.

def build(p: Pipeline) -> None:
    shop = p.capture("shop")                          # a captured database: all its tables at one time
    p.table("orders", shop.table("public.orders"))    # table name = shard name

    clicks = p.topic("clicks", key="click_id", schema="click_id string, product_id long, at timestamp")
    p.table("clicks", clicks)

    @p.derived(key="product_id", every_s=2, by="product_id")
    def clicks_by_product(spark, clicks):             # inputs by the names of their tables, all at one time
        return clicks.groupBy("product_id").count()
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.base.libraries import missing_extra
from tidemill.shards.api import ShardSchema
from tidemill.spark.formats.record_format import PLAIN, RecordFormat, TopicOptions, declare_topic
from tidemill.spark.predicates.expectations import (
    DEAD_LETTER,
    Expectations,
    declared_expectations,
    expectation_check,
)
from tidemill.spark.session.session import is_local
from tidemill.spark.types import Names, split_names

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

DerivedFunction = Callable[..., "DataFrame"]
"""(spark, one DataFrame for each input, in the declared order) → DataFrame."""
SESSION_NAMES = ("spark", "session")
"""Names of a function's first parameter, if its further parameters name the inputs; also with a leading `_`."""


class CapturedTable(msgspec.Struct, frozen=True):
    """A table of a captured database. `as_text`: its arrays that are stored as PostgreSQL's text."""

    capture: str
    table: str
    as_text: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return f"capture/{self.capture}"

    @property
    def fed_by(self) -> str:
        return f"capture:{self.capture}:{self.table}"

    @property
    def upstream(self) -> str:
        """Name of the stage status of the captured table."""
        return f"table:{self.capture}/{self.table}"


class Capture:
    """A captured database, with its name in tidemill.toml. `table("public.orders")` is a source for `p.table`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def table(self, name: str, *, as_text: Names = ()) -> CapturedTable:
        """Return the table `schema.table`; the default schema is public.

        `as_text`: columns of array types, one or several ("a, b"), that are stored as PostgreSQL's text: any array fits
        then, also one of several dimensions.
        """
        texts = split_names(as_text) if as_text else ()
        if not all(texts):
            raise InvalidError(f"as_text names no column: table={name}.", fix='Name the columns, e.g. as_text="cells".')
        return CapturedTable(self.name, name if "." in name else f"public.{name}", texts)


class StreamTopic(msgspec.Struct, frozen=True):
    topic: str
    schema: ShardSchema
    record_format: RecordFormat = PLAIN

    @property
    def source(self) -> str:
        return f"topic/{self.topic}"

    @property
    def fed_by(self) -> str:
        return f"topic:{self.topic}"

    @property
    def upstream(self) -> str:
        return f"topic:{self.topic}"


Input = CapturedTable | StreamTopic


class Table(msgspec.Struct, frozen=True):
    """A declared table. Pass it, or its name, as an input of a derived table."""

    name: str
    source: Input


class DerivedTable(msgspec.Struct, frozen=True):
    """A declared derived table. Pass it, or its name, as an input of another; call it as the function that it is."""

    name: str
    key: tuple[str, ...]
    inputs: tuple[str, ...]
    every_s: float
    function: DerivedFunction
    by: dict[str, tuple[str, ...]] = {}
    """Input → the columns whose values identify a row's group; an input that is not named is passed whole."""
    by_output: tuple[str, ...] = ()
    """The same columns in the result, in the same order."""

    def __call__(self, spark: SparkSession, *inputs: DataFrame) -> DataFrame:
        return self.function(spark, *inputs)


class HistoryTable(msgspec.Struct, frozen=True):
    """A declared history of the table `of`. Pass it, or its name, as an input of a derived table."""

    name: str
    of: str
    track: tuple[str, ...] = ()
    """Columns whose changes begin a version; none: all but the key."""
    every_s: float = 1.0

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.of,)


AnyTable = Table | DerivedTable | HistoryTable
Inputs = str | AnyTable | Sequence[str | AnyTable]


class Pipeline:
    """Collector of declarations. Every method raises InvalidError with the name that is wrong."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tables: dict[str, Input] = {}
        self.expectations: dict[str, Expectations] = {}
        """Table → its expectations, if it has any."""
        self.derived_tables: dict[str, DerivedTable] = {}
        self.histories: dict[str, HistoryTable] = {}

    def capture(self, name: str) -> Capture:
        """Return a captured database: `p.capture("shop").table("public.orders")` is a source for `table`."""
        return Capture(name)

    def topic(self, name: str, *, key: Names, schema: str | StructType, **options: Unpack[TopicOptions]) -> StreamTopic:
        """Return a topic as a source for `table`: of JSON objects, if the options do not name another format.

        `key`: one column or several ("a, b"). `schema`: a StructType or Spark's DDL ("id long, at timestamp").
        """
        return StreamTopic(name, *declare_topic(name, key, schema, options))

    def table(
        self,
        name: str,
        source: Input,
        *,
        expect: Mapping[str, str] | None = None,
        on_violation: str = DEAD_LETTER,
    ) -> Table:
        """Keep table `name` equal to the source: one live row per key, exact at every time.

        `expect`: names of conditions → SQL over the table's columns, such as `{"positive": "total >= 0"}`. A record
        whose row makes one false does not reach the table: it is a dead letter, dropped and counted, or the table stops
        before it (`on_violation`: "dead_letter", "drop" or "fail").
        """
        self._check_name_unused(name)
        if not isinstance(source, CapturedTable | StreamTopic):
            raise InvalidError(f"not a source: table={name}.", fix="Use capture(…).table(…) or topic(…).")
        expectations = declared_expectations(name, expect or {}, on_violation)
        if isinstance(source, StreamTopic):
            expectation_check(source.schema, expectations)
        if expectations is not None:
            self.expectations[name] = expectations
        self.tables[name] = source
        return Table(name, source)

    def derived(
        self,
        name: str = "",
        *,
        key: Names,
        inputs: Inputs | None = None,
        every_s: float = 2.0,
        by: Names | Mapping[str, Names] = (),
    ) -> Callable[[DerivedFunction], DerivedTable]:
        """Keep table `name` equal to a function of other tables, recomputed at most every `every_s` seconds.

        Without `name` it is the function's name. Without `inputs` they are the parameters after the first, which is
        `spark`: each is named as its table.

        `by` names columns that group the table. The result rows of a group may depend only on the inputs' rows of that
        group; then only changed groups are recomputed. Give column names that every input and the result have, or a
        dict from input to its own columns, in the order of `key`, which then groups the result. An input that is not in
        the dict is passed whole, and a change in it recomputes all groups.
        """
        keys, given = split_names(key), None if inputs is None else _input_names(inputs)
        if name:
            self._check_name_unused(name)
        if not keys or not all(keys):
            raise InvalidError(f"derived table needs a key: table={name}.", fix="Name the key columns of its result.")
        if given is not None:
            _check_inputs(name, given)
        if every_s <= 0:
            raise InvalidError(f"interval must be positive: table={name} every_s={every_s}.", fix="Give it in seconds.")

        def declare(function: DerivedFunction) -> DerivedTable:
            called = name or function.__name__
            self._check_name_unused(called)
            inputs = given if given is not None else _check_inputs(called, _inputs_of(called, function))
            grouped, output = _groups(called, keys, inputs, by)
            table = DerivedTable(called, keys, inputs, every_s, function, grouped, output)
            self.derived_tables[called] = table
            return table

        return declare

    def history(self, name: str, *, of: str | AnyTable, track: Names = ()) -> HistoryTable:
        """Keep table `name` equal to the versions of the table `of`: a slowly changing dimension of type 2.

        It has the columns of `of`, `valid_from`, `valid_to` (null: current) and `is_current`; its key is that of `of`
        with `valid_from`. `track`: columns whose changes begin a version, all by default; changes of other columns
        change the current version in place.
        """
        self._check_name_unused(name)
        (source,) = found if len(found := _input_names(of)) == 1 else ("",)
        tracked = split_names(track) if track else ()
        if not source or source == name or (track and not all(tracked)):
            raise InvalidError(f"a history needs one other table: table={name} of={of}.", fix="Name it: of=orders.")
        self.histories[name] = HistoryTable(name, source, tuple(tracked))
        return self.histories[name]

    def check(self) -> None:
        """Check the declarations once all are made. Inputs of derived tables may be shards of other pipelines: not
        checked."""
        if not self.all_tables:
            raise InvalidError(f"pipeline has no tables: pipeline={self.name}.", fix="Call p.table(…) in build.")
        try:
            found = self.derived_tables | self.histories
            TopologicalSorter({name: table.inputs for name, table in found.items()}).prepare()
        except CycleError as error:
            circle = " ← ".join(error.args[1])
            raise InvalidError(
                f"derived tables depend on each other: pipeline={self.name} tables={circle}.",
                fix="Remove the cycle: a derived table can read neither itself nor tables derived from it.",
            ) from error

    @property
    def dead_letters(self) -> str:
        """Name of the shard of dead letters, or "" if no table reads a topic."""
        return f"{self.name}.dead_letters" if self.tables else ""

    @property
    def all_tables(self) -> set[str]:
        """Names of all tables that the pipeline maintains, but for its dead letters."""
        return {*self.tables, *self.derived_tables, *self.histories}

    def fed_by(self) -> dict[str, str]:
        """Return shard → source, as the catalogue names it."""
        return {n: s.fed_by for n, s in self.tables.items()} | dict.fromkeys(
            self.derived_tables | self.histories, "derived"
        )

    def formats(self) -> dict[str, str]:
        """Return shard → format of the topic's records, as the catalogue has it; none for plain JSON objects."""
        found = {n: s.record_format.encode() for n, s in self.tables.items() if isinstance(s, StreamTopic)}
        return {name: text for name, text in found.items() if text}

    def inputs(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Return derived shard → input → the columns that group it, as the catalogue names them."""
        found = {n: {i: t.by.get(i, ()) for i in t.inputs} for n, t in self.derived_tables.items()}
        return found | {name: {table.of: ()} for name, table in self.histories.items()}

    def uses_spark(self, master: str) -> bool:
        """Return whether a driver with this master starts Spark: for derived tables, or for executors (RFC 0014)."""
        return bool(self.derived_tables) or not is_local(master)

    def sources(self) -> dict[str, dict[str, Input]]:
        """Return remap name → the tables that it feeds: one feed each."""
        out: dict[str, dict[str, Input]] = {}
        for name, source in self.tables.items():
            out.setdefault(source.source, {})[name] = source
        return out

    def _check_name_unused(self, name: str) -> None:
        if name in self.all_tables:
            raise InvalidError(f"table is declared twice: table={name}.", fix="Use each table name once.")
        if name == f"{self.name}.dead_letters":
            raise InvalidError(f"this table has the pipeline's dead letters: table={name}.", fix="Use another name.")


def _input_names(given: Inputs) -> tuple[str, ...]:
    if isinstance(given, str):
        return split_names(given)
    many = (given,) if isinstance(given, AnyTable) else given
    return tuple(one.strip() if isinstance(one, str) else one.name for one in many)


def _inputs_of(table: str, function: DerivedFunction) -> tuple[str, ...]:
    """Return the inputs that the function's parameters name."""
    given = list(inspect.signature(function).parameters.values())
    if not given or given[0].name.lstrip("_") not in ("", *SESSION_NAMES):
        raise InvalidError(
            f"the first parameter is not the session: table={table} parameter={given[0].name if given else ''}.",
            fix=f"Write def {function.__name__}(spark, …), or name the inputs with inputs=(…).",
        )
    odd = [one.name for one in given if one.kind not in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if odd:
        raise InvalidError(
            f"the function's parameters do not name its inputs: table={table} parameter={odd[0]}.",
            fix="Name the inputs with inputs=(…).",
        )
    return tuple(one.name for one in given[1:])


def _check_inputs(table: str, inputs: tuple[str, ...]) -> tuple[str, ...]:
    if not inputs or not all(inputs):
        raise InvalidError(f"derived table needs inputs: table={table}.", fix="Name the tables it is computed from.")
    return inputs


def _groups(
    table: str, keys: tuple[str, ...], inputs: tuple[str, ...], by: Names | Mapping[str, Names]
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return (input → the columns that group it, the same columns of the result); both empty if there are no
    groups."""
    if isinstance(by, Mapping):
        grouped, output = {i: split_names(n) for i, n in by.items()}, keys
    else:
        output = split_names(by)
        grouped = dict.fromkeys(inputs, output)
    for one, columns in grouped.items() if output else ():
        if one not in inputs or len(columns) != len(output):
            raise InvalidError(
                f"groups do not match: table={table} input={one} columns={','.join(columns)} of={','.join(output)}.",
                fix="Name inputs of the table, and for each of them as many columns as group the result.",
            )
    return (grouped, output) if output else ({}, ())


def load_pipeline(path: Path, name: str, pipeline: Pipeline | None = None) -> Pipeline:
    """Run the file's `build(p)` and return the pipeline: the given one, or a new one.

    Raises InvalidError if the file or its build is missing, if a declaration is invalid, and for any exception that the
    file raises, as one sentence with its line.
    """
    if not path.is_file():
        raise InvalidError(f"no such pipeline file: file={path}.", fix="Correct pipeline.<name>.file.")
    pipeline = pipeline or Pipeline(name)
    try:
        build = _execute_file(path, f"tidemill_pipeline_{name}").get("build")
        if callable(build):
            build(pipeline)
    except InvalidError:
        raise
    except SyntaxError as error:
        raise InvalidError(
            f"pipeline file does not parse: file={path} line={error.lineno}.", fix="Correct it."
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also sys.exit: the file is the user's, the process is not
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": ")
        extra = missing_extra(error) if isinstance(error, ModuleNotFoundError) else None
        raise InvalidError(
            f"pipeline file raises: file={path} line={_line_in(path, error)} error={said}.",
            fix=extra.fix if extra is not None else "Correct it.",
        ) from error
    if not callable(build):
        raise InvalidError(f"pipeline file has no build: file={path}.", fix="Define build(p: Pipeline).")
    pipeline.check()
    return pipeline


def _execute_file(path: Path, name: str) -> dict[str, Any]:
    """Execute a file as runpy.run_path does, which only one thread of a process may use at a time.

    The module is in sys.modules only while it runs: so what it defines is pickled by value for executors.
    """
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    finally:
        sys.modules.pop(name, None)
    return module.__dict__


def _line_in(path: Path, error: BaseException) -> int:
    """Return the innermost line of the traceback in this file; 0 if it was not reached."""
    lines = [f.lineno or 0 for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return lines[-1] if lines else 0
