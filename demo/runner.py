"""The demo from start to verified end.

    prepare → supervise node and driver → load and clicks → (crash) → stop the load → drain → verify → report

All observations are made from outside: the follower uses HTTP, the latency of shards is measured by listening to one,
and verification is the command `tidemill verify`, which reads source and shards from the start.

Does not own the processes: `tidemill.node.supervise` starts, restarts and kills them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from demo import shop
from demo.environment import Environment
from demo.follower import Follower
from demo.invariant_check import MoneyCheck, MoneyChecker
from demo.latency_report import Latencies, Report
from tidemill.base.address import Address
from tidemill.base.clock import Clock, Rand, SystemClock
from tidemill.base.errors import InvalidError, MissingError, UnavailableError
from tidemill.base.runtime.tasks import Tasks
from tidemill.base.status.freshness import walk_to_source
from tidemill.base.status.status import DerivedStatus, StageState, derive_statuses
from tidemill.base.status.status import StatusReport as MarksReport
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.status.board import StatusBoard
from tidemill.metastore.catalogue import Catalogue, PipelineRow, TopicRow
from tidemill.metastore.factory import create_metastore, open_bucket
from tidemill.node.supervise.processes import offset_port, start_all
from tidemill.node.supervise.supervisor import Supervisor
from tidemill.shards.api import Shard
from tidemill.shards.registry import open_remap, open_shard

ROOT = Path(__file__).parents[1]
TABLES = (*shop.TABLES, "clicks", "conversion_by_product")
OPEN_ORDERS = {"table": "public.orders", "where": "w_id = 1 AND status = 'open'"}
CRASH_EVERY_S = 14.0
CRASH_GRACE_S = 30.0
"""Time for a lease to expire and for a killed process and its JVM to start; stages are not counted as stuck in it."""
MONEY_EVERY_S = 2.0
DRAIN_TIMEOUT_S = 300.0
RECENT_CHECKS = 30
VERIFIED = ("rows", "missing", "extra", "different", "poisoned")


class Runner:
    def __init__(
        self,
        environment: Environment,
        *,
        rate: float,
        click_rate: float,
        crash: bool,
        nodes: int = 1,
        stuck_after_s: float = 0,
    ) -> None:
        self.environment = environment
        self.report = Report()
        self.checks: list[MoneyCheck] = []
        self.marks: dict[str, DerivedStatus] = {}
        self.load_counts: dict[str, int] = {}
        self.click_counts: dict[str, int] = {}
        self.phase = "starting"
        self.supervisor: Supervisor
        """The demo's processes, once `run` has started them."""
        self._rate = rate
        self._click_rate = click_rate
        self._crash = crash
        self._nodes = nodes
        self._stuck_after_s = stuck_after_s
        self._clock: Clock = SystemClock()
        self._rand = Rand()
        self._ready_ms = self._clock.now_ms()
        self._to_shard = Latencies()
        self._to_client = Latencies()
        self._stopping = asyncio.Event()
        self._failure: BaseException | None = None
        self._loads: list[asyncio.subprocess.Process] = []
        self._dead_letters_before = 0
        self._stuck: dict[str, str] = {}
        self._graced_until_s = 0.0
        # the follower uses the last node: every node must serve the tables that another node captures
        last_http = offset_port(environment.config.node.http, nodes - 1)
        self._follower = Follower(last_http, OPEN_ORDERS, self._clock, self._client_row)

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, seconds: float | None) -> Report:
        """Run the load for `seconds`, or without a limit; then drain and verify. Raises the refusal of a child.

        With kills the time counts from the first row in a shard, when the kills begin. So the number of kills does
        not depend on the start-up time of the machine.
        """
        config = self.environment.config
        consensus = await open_consensus(config.consensus_url, self._clock, self._rand)
        objects = await open_bucket(consensus, config.objects_url, self._clock, self._rand)
        supervisor = self.supervisor = start_all(config, self._clock, self.fail, nodes=self._nodes)
        self._consensus, self._objects = consensus, objects
        self._board = StatusBoard(consensus, self._rand)
        domains = config.metastore.domains
        metastore = create_metastore(consensus, objects, self._clock, self._rand, domains=domains)
        self._catalogue = Catalogue(metastore, self._clock, self._rand)
        self._dead_letters_before = await self._dead_letters()
        self._follower.start()
        try:
            async with Tasks(lambda _, error: self.fail(error)) as tasks:
                tasks.spawn(self._watch_marks(), name="demo-marks")
                await self._start_load(tasks)
                self.phase = "running"
                tasks.spawn(self._watch_shard(), name="demo-shard")
                tasks.spawn(self._watch_money(), name="demo-money")
                if self._crash:
                    first_row = tasks.spawn(self._await_shard("payment"), name="demo-first-row")
                    stopped = tasks.spawn(self._stopping.wait(), name="demo-stopped")
                    await asyncio.wait([first_row, stopped], return_when=asyncio.FIRST_COMPLETED)
                    crashing = tasks.spawn(self._crash_in_turn(supervisor), name="demo-crash")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._stopping.wait()
                self._check_failure()
                if self._crash:
                    crashing.cancel()
                if seconds is not None:
                    await self._finish()
                    self._check_failure()
        finally:
            self._follower.stop()
            await self._stop_load()
            await supervisor.stop()
            await metastore.aclose()
            await consensus.aclose()
            await objects.aclose()
        return self.report

    async def _open_shard(self, name: str) -> Shard:
        return await open_shard(self._consensus, self._objects, self._clock, self._rand, name)

    # load ------------------------------------------------------------------------------------------

    async def _start_load(self, tasks: Tasks) -> None:
        await self._until_ready()
        load = ["demo.load", "--dsn", self.environment.dsn, "--rate", str(self._rate)]
        kafka = self.environment.config.node.kafka
        brokers = ",".join(offset_port(kafka, number) for number in range(self._nodes))
        clicks = ["demo.clicks", "--brokers", brokers]
        clicks += ["--rate", str(self._click_rate)]
        for arguments, counts in ((load, self.load_counts), (clicks, self.click_counts)):
            seed = str(self._rand.below(1 << 30))
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *arguments, "--seed", seed,
                stdout=asyncio.subprocess.PIPE, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
            self._loads.append(process)
            tasks.spawn(self._read_counts(process, counts), name=arguments[0])

    async def _until_ready(self) -> None:
        """Wait until the node answers and the topic `clicks` exists, which the producers need."""
        while not self._stopping.is_set():
            with contextlib.suppress(UnavailableError):
                row = await self._catalogue.get(TopicRow, "clicks")
                if row is not None and await self._answers():
                    return
            await asyncio.sleep(0.1)

    async def _answers(self) -> bool:
        try:
            _, writer = await asyncio.open_connection(*Address.parse(self.environment.config.node.http))
        except OSError:
            return False
        writer.close()
        return True

    @staticmethod
    async def _read_counts(process: asyncio.subprocess.Process, counts: dict[str, int]) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            counts.update(json.loads(line))

    async def _stop_load(self) -> None:
        for process in self._loads:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        for process in self._loads:
            await process.wait()

    # watching --------------------------------------------------------------------------------------

    async def _watch_marks(self) -> None:
        while True:
            with contextlib.suppress(UnavailableError):
                self.marks = derive_statuses(await self._board.reports(), self._clock.now_ms())
                self._record_stuck_stages()
                facts: dict[str, object] = {"money": [msgspec.to_builtins(c) for c in self.checks[-RECENT_CHECKS:]]}
                await self._board.publish(MarksReport("demo", self._clock.now_ms(), (), facts))
            await asyncio.sleep(1)

    def _record_stuck_stages(self) -> None:
        """Record each stage that is stuck for longer than the limit.

        Only time after the grace time of the last kill counts: a driver that is killed more often than it can start
        does not advance for several kills.
        """
        undisturbed_s = self._clock.monotonic_s() - self._graced_until_s
        if undisturbed_s < 0:
            return
        for name, derived in self.marks.items():
            long = min(derived.standing_ms / 1000, undisturbed_s) >= self._stuck_after_s
            if derived.state is StageState.STUCK and long and name not in self._stuck:
                mark = derived.mark
                held = f" held by {mark.held_by}" if mark.held_by else ""
                self._stuck[name] = f"{name} stuck for {derived.standing_ms / 1000:.1f} s: {mark.reason}{held}"
                print(f"demo: {self._stuck[name]}", file=sys.stderr, flush=True)

    def _client_row(self, operation: str, row: dict[str, str | None], received_ms: int) -> None:
        placed_at = row.get("placed_at")
        if operation == "insert" and placed_at:
            self._to_client.add(received_ms - datetime.fromisoformat(placed_at).timestamp() * 1000)

    async def _watch_shard(self) -> None:
        """Measure the time from the commit of a payment until a listener of the shard receives it."""
        shard = await self._await_shard("payment")
        upper = 0
        while True:
            # the measurement continues after storage was unavailable
            with contextlib.suppress(UnavailableError):
                if not upper:
                    _, upper = await shard.frontiers()
                async for delta in shard.listen(upper):
                    seen_ms, upper = self._clock.now_ms(), delta.upper
                    for paid_at in delta.rows.column("paid_at").to_pylist():
                        self._to_shard.add(seen_ms - paid_at.timestamp() * 1000)
            await asyncio.sleep(1)

    async def _await_shard(self, name: str) -> Shard:
        while True:
            try:
                shard = await self._open_shard(name)
                _, upper = await shard.frontiers()
                if upper > 0:
                    if self.report.first_shard_row_s is None:
                        self.report.first_shard_row_s = (self._clock.now_ms() - self._ready_ms) / 1000
                    return shard
            except (MissingError, UnavailableError):
                pass
            await asyncio.sleep(0.1)

    async def _watch_money(self) -> None:
        warehouse = await self._await_shard("warehouse")
        remap = await open_remap(self._consensus, self._clock, self._rand, "capture/shop")
        checker = MoneyChecker(self.environment.dsn, remap, warehouse, self._rand)
        while True:
            check = await checker.check()
            if check is not None:
                self.checks = [*self.checks[-RECENT_CHECKS:], check]
                self.report.money_checks += 1
                self.report.money_unequal += not check.equal
            await asyncio.sleep(MONEY_EVERY_S)

    # faults ----------------------------------------------------------------------------------------

    async def _crash_in_turn(self, supervisor: Supervisor) -> None:
        async for name in self._victims(list(supervisor.children)):
            if supervisor.children[name].kill():
                self.report.crashes += 1
                self._graced_until_s = self._clock.monotonic_s() + CRASH_GRACE_S

    @staticmethod
    async def _victims(names: list[str]) -> AsyncIterator[str]:
        while True:
            for name in names:
                await asyncio.sleep(CRASH_EVERY_S)
                yield name

    def fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stopping.set()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # the end ---------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        self.phase = "draining"
        await self._stop_load()
        self.report.produced = self.click_counts.get("produced", 0)
        self.report.malformed = self.click_counts.get("malformed", 0)
        self.report.transactions = self.load_counts.get("transactions", 0)
        await self._drain()
        self.report.spark = version("pyspark")
        self.phase = "verifying"
        self.report.commit_to_shard_ms = self._to_shard.summary()
        self.report.commit_to_client_ms = self._to_client.summary()
        if self._follower.first_row_ms is not None:
            self.report.first_client_row_s = (self._follower.first_row_ms - self._ready_ms) / 1000
        await self._verify()
        self.report.dead_letters = await self._dead_letters() - self._dead_letters_before
        self.phase = "done"

    async def _verify(self) -> None:
        """Run `tidemill verify` in another process, since this one may host the sequencer of all processes."""
        command = [sys.executable, "-m", "tidemill", "verify", "--json", "--config", str(self.environment.config_path)]
        verify = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            output, errors = await verify.communicate()
        finally:
            if verify.returncode is None:
                verify.kill()
        if verify.returncode not in (0, 1) or not output:
            raise InvalidError(
                f"tables could not be verified: error={errors.decode(errors='replace').strip()[-500:]!r}."
            )
        self.report.equal = verify.returncode == 0
        for table, found in json.loads(output).items():
            self.report.verify[table] = {count: found[count] for count in VERIFIED}

    async def _dead_letters(self) -> int:
        row = await self._catalogue.get(PipelineRow, "shop")
        if row is None or not row.dead_letters:
            return 0
        with contextlib.suppress(MissingError):
            shard = await self._open_shard(row.dead_letters)
            _, upper = await shard.frontiers()
            return len(await shard.snapshot(upper - 1)) if upper else 0
        return 0

    async def _drain(self) -> None:
        """Wait until the upper of every table has passed the end of the load. Report late tables as stuck."""
        stopped_ms = self._clock.now_ms()
        deadline_s = self._clock.monotonic_s() + DRAIN_TIMEOUT_S
        while True:
            behind = [name for name in TABLES if await self._upper(name) <= stopped_ms]
            if not behind:
                self.report.stuck = list(self._stuck.values())
                return
            if self._clock.monotonic_s() > deadline_s:
                self.report.stuck = [*self._stuck.values(), *(self._explain(name) for name in behind)]
                return
            await asyncio.sleep(0.2)

    async def _upper(self, name: str) -> int:
        with contextlib.suppress(MissingError, UnavailableError):
            return (await (await self._open_shard(name)).frontiers())[1]
        return 0

    def _explain(self, table: str) -> str:
        name = f"shard:{table}"
        chain = list(walk_to_source(self.marks, name)) if name in self.marks else []
        return f"{table}: " + (" <- ".join(f"{d.mark.name} {d.state} {d.mark.reason}" for d in chain) or "no mark")
