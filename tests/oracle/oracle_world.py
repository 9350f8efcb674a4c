"""One seeded world: a PostgreSQL, a node that captures it, writers, clients, kills; judged at every pause.

    tables, shapes ─► [ writers + changes of descriptions + SIGKILL, SIGSTOP ] ─► pause, judge ─► again … ─► judge

The seed determines tables, clauses, the statements of each writer and the kinds of faults; their timing depends on the
machine.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle_large
import psycopg
from oracle_changes import Changer
from oracle_clauses import random_clause
from oracle_failover import Failover
from oracle_follower import Follower
from oracle_history import History
from oracle_judge import Judge, Shape, Source
from oracle_load import Gate, Worker, Writer, connect
from oracle_publications import Publications
from oracle_shards import PIPELINE, pipeline_of
from oracle_stock import StockClients, installed
from oracle_tables import LEDGER, SCHEMAS, SETUP, Table, identifier, random_table

from support.faults.cluster import Cluster, cluster, until
from support.postgres import EmbeddedPostgres
from tidemill.capture.naming import table_name
from tidemill.cli.context import open_stores
from tidemill.metastore.catalogue import CaptureTableRow

CAPTURE = "world"


@dataclass(frozen=True)
class Plan:
    """Size and features of a random world."""

    seed: int
    rounds: int = 3
    round_s: float = 6.0
    tables: tuple[int, int] = (2, 5)
    writers: int = 3
    kills: int = 1
    """Number of kills in each round."""
    changes: bool = True
    pause_s: float = 0.03
    shards: bool = False
    """Let a pipeline keep the first tables; faults then affect its driver, too."""
    publications: bool = False
    """Create publications of other owners over the same tables."""
    deferrable: bool = False
    """Give half of the tables deferrable keys."""
    failover: bool = False
    """Fail over once, to a standby that lags."""
    large: bool = False
    """Execute a transaction of 200,000 rows on a separate table in each round."""

    @property
    def features(self) -> list[str]:
        return [name for name in ("publications", "deferrable", "failover", "large") if getattr(self, name)]


class World:
    def __init__(
        self, plan: Plan, dsn: str, directory: Path, stack: ExitStack, server: EmbeddedPostgres | None = None
    ) -> None:
        self.plan = plan
        self.rand = random.Random(f"{plan.seed} world")
        self.dsn = dsn
        self.stack = stack
        self.gate = Gate()
        self.history = History()
        self.tables: list[Table] = []
        self.shapes: list[Shape] = []
        self.faults: list[str] = []
        self._made = 0
        self._control = stack.enter_context(connect(dsn, autocommit=True))
        self._control.execute(SETUP)  # type: ignore[arg-type]
        self._ddl = stack.enter_context(connect(dsn))
        self.workers: list[Worker] = []
        self.others = Publications(random.Random(f"{plan.seed} publications"), self.tables)
        self.failover: Failover | None = None
        if plan.failover:
            assert server is not None, "a failover needs a server of its own"
            self.failover = Failover(server, directory, stack)
        self._over_after = self.rand.randrange(max(1, plan.rounds - 1)) if plan.failover else -1
        self.large: list[Shape] = []
        if plan.large:
            self._control.execute(oracle_large.DDL)
        for _ in range(self.rand.randint(*plan.tables)):
            self._create(self._new_table())
        self._seed_rows()
        if plan.publications and self.rand.random() < 0.5:
            self.others.turn(self._control)
        self.cluster = self._start(directory)
        self.stock = (
            StockClients(f"http://{self.cluster.http}/v1/shape", directory / "stock.log") if installed() else None
        )
        if self.stock is not None:
            stack.callback(self.stock.close)
        self.judge = Judge(self._source(), self.history)
        for table in self.tables:
            self._follow(table)
        if plan.large:
            self._follow_large()

    # making ----------------------------------------------------------------------------------------
    def _new_table(self) -> Table:
        self._made += 1
        made = random_table(self.rand, self._made, deferrable=self.plan.deferrable)
        # An application that has publications of all its tables gives one whose key is no identity another itself.
        made.whole = made.deferrable != "" and (self.plan.publications or self.rand.random() < 0.3)
        return made

    def _create(self, table: Table) -> None:
        for statement in table.ddl():
            self._ddl.execute(statement)  # type: ignore[arg-type]
        self._ddl.commit()
        self.tables.append(table)

    def _seed_rows(self) -> None:
        """Insert rows before the tables are captured."""
        writer = Writer("seeding", self.dsn, str(self.plan.seed), self.tables, self.gate, 0)
        with connect(self.dsn) as connection:
            for _ in range(20):
                writer._attempt(connection)

    def _start(self, directory: Path) -> Cluster:
        patterns = ", ".join(f"'{pattern}'" for pattern in ("public.*", f'"{SCHEMAS[1]}".*'))
        dsn = self.dsn if self.failover is None else self.failover.dsn
        toml = f'[capture.{CAPTURE}]\ndsn = "{dsn}"\ntables = [{patterns}]\nbinding_interval_ms = 20\n'
        if self.failover is not None and self.failover.slots:
            toml += "failover = true\n"
        if self.plan.publications:
            toml += "copy_again_pause_s = 1\n"
        toml += "[shapes]\nlong_poll_s = 2\nsse_s = 8\n"
        if self.plan.shards:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "pipeline.py").write_text(pipeline_of(CAPTURE, self.tables))
            toml += f'[pipeline.{PIPELINE}]\nfile = "{directory / "pipeline.py"}"\n'
            for table in self.tables:
                table.kept = True
        made = self.stack.enter_context(cluster(directory, toml))
        made.ready()
        self._stores = self.stack.enter_context(open_stores(made.config, create=True))
        return made

    def _source(self) -> Source:
        def rows() -> Mapping[str, CaptureTableRow]:
            return {row.table: row for row in self._stores.portal.call(self._stores.catalogue.tables(CAPTURE))}

        def confirmed() -> int:
            query = "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = %s"
            return int(self._control.execute(query, (f"tidemill_{CAPTURE}",)).fetchone()[0])  # type: ignore[index]

        def select(statement: str) -> list[tuple[Any, ...]]:
            return self._control.execute(statement).fetchall()  # type: ignore[arg-type]

        shards = self.cluster.config if self.plan.shards else None
        return Source(CAPTURE, self.cluster.kafka, select, rows, lambda: self.cluster.marks(), confirmed, shards)

    def _follow(self, table: Table) -> None:
        """Create shapes over a table, each with clients of different kinds."""
        rand = self.rand
        for number in range(rand.randint(1, 3)):
            where = random_clause(rand, table) if number else ""
            columns: list[str] = []
            if rand.random() < 0.3:
                columns = [n for n in table.names if n in table.key or rand.random() < 0.5]
            params = {"table": f"{identifier(table.schema)}.{identifier(table.name)}"}
            if where:
                params["where"] = where
            if columns:
                params["columns"] = ",".join(map(identifier, columns))
            if rand.random() < 0.4:
                params["replica"] = "full"
            shape = Shape(table, where, columns, table.breaks)
            for sse in {False, rand.random() < 0.4}:
                client = Follower(self.cluster.http, params, columns or table.names, table.key, sse=sse)
                client.start()
                self.stack.callback(client.stop)
                shape.clients.append(client)
            if self.stock is not None and rand.random() < 0.6:
                name = f"{table.number}/{len(self.shapes)} {params['table']}"
                shape.clients.append(self.stock.follow(name, params, sse=rand.random() < 0.5))
            self.shapes.append(shape)

    def _follow_large(self) -> None:
        table = oracle_large.TABLE
        params = {"table": f"{table.schema}.{table.name}", "where": oracle_large.WHERE}
        shape = Shape(table, oracle_large.WHERE, [])
        for sse in (False, True):
            client = Follower(self.cluster.http, params, table.names, table.key, sse=sse)
            client.start()
            self.stack.callback(client.stop)
            shape.clients.append(client)
        self.large.append(shape)

    # running ---------------------------------------------------------------------------------------
    def run(self) -> None:
        seed = str(self.plan.seed)
        workers = self.workers
        workers += [
            Writer(f"writer{n}", self.dsn, seed, self.tables, self.gate, self.plan.pause_s)
            for n in range(self.plan.writers)
        ]
        if self.plan.changes:
            workers.append(Changer("changer", self.dsn, seed, self.tables, self.gate, 0.7, make=self._new_table))
        for worker in workers:
            worker.start()
        try:
            for number in range(self.plan.rounds):
                if self.plan.publications:
                    with self.gate.closed():
                        self.others.turn(self._control)
                self._round()
                with self.gate.closed():
                    if self.plan.publications and number == self.plan.rounds - 1:
                        self.others.end(self._control)
                    self._judge()
                    if self.plan.large and number < len(oracle_large.KINDS):
                        self._large_transaction([*oracle_large.KINDS][number])
                if number < self.plan.rounds - 1:
                    self._go_on()
                if number == self._over_after:
                    self._fail_over()
        finally:
            for worker in workers:
                worker.stop()
            self.counts = sum((worker.counts for worker in workers), self.others.counts)
        assert self.counts["committed"] > 5 * self.plan.rounds, f"the writers did next to nothing: {self.counts}"

    def _round(self) -> None:
        """Inject faults at random moments of a round, and end it calmly, so that the node can be judged."""
        moments = sorted(self.rand.random() * self.plan.round_s * 0.9 for _ in range(self.plan.kills))
        began_s = time.monotonic()
        for moment in [*moments, self.plan.round_s]:
            time.sleep(max(0.0, began_s + moment - time.monotonic()))
            if moment < self.plan.round_s:
                self._fault()

    def _fault(self) -> None:
        kinds = ["kill node", "kill node", "kill all", "stop node"]
        kind = self.rand.choice([*kinds, "kill pipeline", "kill pipeline"] if self.plan.shards else kinds)
        self.faults.append(kind)
        made = self.cluster
        until(lambda: "node" in made.children(), lambda: made.said)
        if kind == "kill all":
            made.kill()
            made.up()
        elif kind in ("kill node", "kill pipeline"):
            child = kind.removeprefix("kill ")
            until(lambda: child in made.children(), lambda: made.said)
            made.signal(child, signal.SIGKILL)
        else:
            pid = made.children()["node"]
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.rand.uniform(0.5, 3))
            os.kill(pid, signal.SIGCONT)

    def _judge(self) -> None:
        mark: Any = self._control.execute(LEDGER + " RETURNING n, what", ("mark",)).fetchone()
        self.history.read_on(self._control)
        self.judge.judge(mark, self.tables, self.shapes, self.large)
        for worker in self.workers:
            worker.paused = False

    def _large_transaction(self, kind: str) -> None:
        """Execute a large transaction. It may end the shapes of its table, but not those of other tables with
        concurrent writes."""
        before = self.judge.held(self.shapes)
        quiet = Writer(f"beside {kind}", self.dsn, str(self.plan.seed), self.tables, Gate(), self.plan.pause_s)
        quiet.truncates = False

        def written_meanwhile() -> bool:
            return quiet.counts["committed"] > 0 or not quiet.is_alive()

        quiet.start()
        try:
            with connect(self.dsn) as connection:
                oracle_large.transact(connection, kind, lambda: until(written_meanwhile, lambda: str(quiet.counts)))
        finally:
            quiet.stop()
        self.judge.settle_s, usual_s = oracle_large.SETTLE_S, self.judge.settle_s
        self._judge()
        self.judge.settle_s = usual_s
        ended = [client.name for client, refetches in before if client.view().refetches != refetches]
        assert not ended, f"shapes of other tables ended with the {kind} of {oracle_large.ROWS} rows: {ended}"
        self.judge.counts["shapes beside a large transaction"] += len(before)
        assert quiet.counts["committed"], "nothing was written beside"

    def _fail_over(self) -> None:
        """Fail over. The standby lacks all commits between its cut and its promotion."""
        assert self.failover is not None
        for worker in self.workers:
            worker.paused = isinstance(worker, Changer)
        with self.gate.closed():
            self.failover.cut(f"tidemill_{CAPTURE}")
        time.sleep(self.rand.uniform(0.3, 3))
        with self.gate.closed():
            mark: Any = self._control.execute(LEDGER + " RETURNING n, what", ("lost",)).fetchone()
            if captured := self.rand.random() < 0.7:
                self.judge.captured(mark)
            self.history.read_lost(self._control)
            self.judge.moved([*self.shapes, *self.large], self.failover.cut_lsn)
            self.dsn = self.failover.over()
            for connection in (self._control, self._ddl):
                connection.close()
            self._control = self.stack.enter_context(connect(self.dsn, autocommit=True))
            self.faults.append(f"failover{' of what is captured' * captured}")
            for worker in self.workers:
                worker.dsn = self.dsn

    def _go_on(self) -> None:
        """Copy parked tables again, and give new tables clients."""
        rows = self.judge._source.rows()
        followed = {shape.table.number for shape in self.shapes}
        for table in self.tables:
            name = table_name(table.schema, table.name)
            row = rows.get(name)
            if table.gone:
                self._leave(table)
            elif row is not None and row.state == "parked" and not table.listed and self.rand.random() < 0.7:
                known = len(table.broken)
                accepts = table.kept and self.rand.random() < 0.6
                code, reported = self.cluster.command("capture", "accept" if accepts else "resnapshot", name, "--yes")
                if code and table.gone:
                    continue
                assert code == 0, reported
                table.copied_again(known, accepted=accepts)
                self._leave(table)
                self._follow(table)
            elif table.number not in followed or (
                row is not None and row.is_streaming and any(s.over for s in self.shapes if s.table is table)
            ):
                self._leave(table)
                self._follow(table)

    def _leave(self, table: Table) -> None:
        for shape in self.shapes:
            if shape.table is table:
                for client in shape.clients:
                    client.stop()
        self.shapes = [shape for shape in self.shapes if shape.table is not table]

    def _sessions(self) -> list[str]:
        """Return the state of the server's sessions, with the sessions that block them."""
        query = (
            "SELECT application_name, pid, state, wait_event_type, wait_event, (now() - state_change)::text,"
            " (now() - xact_start)::text, pg_blocking_pids(pid), left(query, 200) FROM pg_stat_activity"
            " WHERE backend_type IN ('client backend', 'walsender') AND pid <> pg_backend_pid()"
        )
        try:
            with connect(self.dsn, autocommit=True) as connection:
                return [f"session {row}" for row in connection.execute(query).fetchall()]
        except psycopg.Error as error:
            return [f"no session is known: {error}"]

    def describe(self) -> str:
        """Return the description of the world for the output of a failure."""
        lines = [f"seed {self.plan.seed}, with {self.plan.features}, faults {self.faults}, others {self.others.held}"]
        for table in self.tables:
            shown = ", ".join(column.sql for column in table.columns)
            key = f"key={table.key} deferrable={table.deferrable!r} whole={table.whole} listed={table.listed!r}"
            lines.append(f"{table.sql_name} {key} gone={table.gone} changes={table.changed}: {shown}")
        lines += [f"shape {shape} followed by {[client.name for client in shape.clients]}" for shape in self.shapes]
        lines += self._sessions()
        return "\n".join(lines)


@contextmanager
def world(plan: Plan, dsn: str, directory: Path, server: EmbeddedPostgres | None = None) -> Iterator[World]:
    """Run a world. Any failure within is reported with the seed and the generated world. `server`: the server of `dsn`,
    which a failover kills."""
    with ExitStack() as stack:
        made = World(plan, dsn, directory, stack, server)
        try:
            yield made
        except BaseException as error:
            error.add_note(made.describe())
            raise
        finally:
            made.gate._open = True
