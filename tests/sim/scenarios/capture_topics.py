"""A whole capture between a model of PostgreSQL and stores with faults: the real sessions with all their parts (set-up,
copies before and during the stream, converter, collector, tracker, status, topic writer, binder), the real topic room,
and real shapes on the same stream.

Faults: every store fault; the capture process dies at any step and begins again at the last position confirmed to the
server; statuses are delayed or lost; queries and streams are cut, after which a session begins again in the same
process; some rows cannot be read, written or copied, which pauses their table; re-snapshots are requested during all
that. Keys are deferrable in every fifth world, and rows exchange their keys within a statement.
In some worlds copies are so slow that concurrent changes go to the side topic, sometimes up to a limit:
`capture_aside`. Some databases fail over to a standby that is behind: `capture_forks`.
Oracle:
    confirmed ≤ bound ≤ durable   the position confirmed to the server never passes a commit that no stored binding
                                  covers, and no stored binding passes the contents of the topics
    boundaries                    every binding describes one commit boundary, of tables that were copied before
    contents                      after healing each topic holds its copy and then the committed history, once and in
                                  order, unless its table was paused; every marker is bound exactly at its commit
    liveness                      nothing is pending, and the last commit is confirmed to the server
Shapes: `capture_shapes`; shapes that outlive their process: `capture_kept`.
Replay: ./dev sim --room capture --seed K --trace
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from pathlib import Path

from msgspec.structs import replace

from sim.scenarios.capture_aside import FAULTS as ASIDE_FAULTS
from sim.scenarios.capture_aside import planted_aside, slowly_copied
from sim.scenarios.capture_database import STRANGER, VANISHING, WIDE, WRITERS, Database, Txn
from sim.scenarios.capture_forks import FAULTS as FORK_FAULTS
from sim.scenarios.capture_forks import NARROW, failing_over, planted_fork
from sim.scenarios.capture_kept import Followers, KeptShapes, Machines, quickened
from sim.scenarios.capture_kept_plants import BAD_DISK, MOVES, planted_kept
from sim.scenarios.capture_kept_plants import PLACES as KEPT_FAULTS
from sim.scenarios.capture_oracle import NAME, Oracle
from sim.scenarios.capture_plants import FAULTS as SESSION_FAULTS
from sim.scenarios.capture_plants import planted
from sim.scenarios.capture_server import Server, answering
from sim.scenarios.capture_shapes import DSN, Shapes
from sim.world import Actor, Crew, Down, NotLive, World, swapped
from tidemill.base.errors import TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Tasks
from tidemill.capture.config import CaptureConfig
from tidemill.capture.session.capture import Capture
from tidemill.capture.tables.recopy_requests import request_recopy
from tidemill.capture.topics import captured_table
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.factory import create_metastore
from tidemill.shards.bindings.remap import LogRemap
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import SingleNodeAssignment

__all__ = ["FAULTS", "run"]

FAULTS = (*SESSION_FAULTS, *ASIDE_FAULTS, *KEPT_FAULTS, *FORK_FAULTS)

ROW_BYTES = 300
"""Width above which a row cannot be written here."""
ASIDE_SHARE = 0.4
"""Share of worlds in which copies are slow and concurrent changes go to the side topic."""
FORK_SHARE = 0.25
"""Share of the worlds without stored shapes in which the database fails over."""
KEPT_SHARE = 0.4
"""Share of worlds in which shapes outlive their capture process."""
SETTLES_S = 120.0
"""Virtual time after healing within which everything must be complete."""


class Process:
    """Capture process: topics, the capture, shapes."""

    def __init__(self, db: Database, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.tasks = Tasks(self._failed)
        self._world = db.world
        self.capture: Capture
        self.running: asyncio.Task[None]
        self.shapes: Shapes
        self.kept: KeptShapes | None = None

    async def leave(self) -> None:
        """Leave in order; another process continues the capture."""
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.capture.aclose()
        if self.kept is not None:
            await self.kept.leave()

    def _failed(self, name: str, error: BaseException) -> None:
        self._world.loop.call_exception_handler({"message": f"{name} failed: {error}", "exception": error})


async def run(world: World, fault: str = "") -> None:
    source = world.source
    with contextlib.ExitStack() as stack:
        stack.enter_context(swapped(captured_table, "MAX_ROW_BYTES", ROW_BYTES))
        stack.enter_context(planted(world, fault))
        stack.enter_context(planted_kept(fault))
        stack.enter_context(planted_aside(fault))
        stack.enter_context(planted_fork(fault))
        # All other worlds keep their histories.
        deferrable = fault == "late-tombstone" or (not fault and world.seed % 5 == 2)
        tables = 3 if fault in NARROW else source.randint(1, 3)
        await _run(world, fault, Database(world, tables, deferrable=deferrable), stack)


async def _run(world: World, fault: str, db: Database, stack: contextlib.ExitStack) -> None:
    source = world.source
    config = CaptureConfig(
        NAME,
        DSN,
        tables=("public.*", f"!public.t{STRANGER}"),
        partitions=source.randint(1, 2),
        binding_interval_ms=source.choice((1, 50)),
        idle_binding_ms=500,
        heartbeat_s=10_000.0,  # so that work that only a later commit would resume counts as stuck
        table_poll_s=source.choice((0.1, 0.5)),
        fragment_changes=source.choice((2, 2, 3, 500)),
        queue_changes=source.choice((2, 20_000)),
        copy_again=False,  # a paused table stays paused until the operator of this world acts
    )
    copies = random.Random(f"copies {world.seed}")  # a separate source, so that the rest of a world does not change
    config = replace(config, copy_connections=copies.choice((1, 1, 3)), copy_chunk_blocks=copies.choice((1, 4, 100)))
    slow = fault in ASIDE_FAULTS or (not fault and copies.random() < ASIDE_SHARE)
    if slow:
        config = slowly_copied(copies, config, stack, fault)
    # Without a gap between rounds, more batches are in flight at the same time.
    config = replace(config, linger_ms=10 if fault else random.Random(f"gap {world.seed}").choice((0, 10, 100)))
    if fault == "seed002":
        config = replace(config, fragment_changes=2)
    oracle = Oracle(world, db, config)
    server = Server(db, oracle.check_reported, late_publication=fault == "late-publication")
    stack.enter_context(answering(server))
    settings = TopicSettings(
        object_bytes=source.choice((300, 1 << 20)),
        uploads_in_flight=source.randint(1, 4),
        linger_s=source.choice((0.0, 0.0, 0.05)),
        append_budget_s=source.choice((0.5, 10.0)),
    )
    readers = source.randint(1, 3)
    machines: Machines | None = None
    harsh = fault in KEPT_FAULTS
    # A separate source: the other worlds do not depend on it.
    if harsh or (not fault and random.Random(f"kept {world.seed}").random() < KEPT_SHARE):
        patient = harsh or source.random() < 0.5
        stack.enter_context(quickened(world, harsh=harsh, patient=patient))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-sim-")))
        machines = Machines(db, directory, count=source.choice((1, 1, 2)))
        if fault in MOVES:
            machines.alternate = 2
        if fault in BAD_DISK:
            machines.alternate = 1
            machines.disk.worsen()
        stack.callback(machines.close)

    async def build(actor: Actor[Process]) -> Process:
        consensus, objects, rand = actor.consensus(), actor.objects(), world.rand()
        catalogue = Catalogue(
            create_metastore(consensus, objects, actor.clock, rand, holder=str(actor.life)), actor.clock, rand
        )
        topics = LocalTopics(
            consensus, objects, catalogue, clock=actor.clock, rand=rand,
            assignment=SingleNodeAssignment(actor.name, actor.life.number), settings=settings,
        )  # fmt: skip
        await topics.start()
        process = Process(db, catalogue)
        remap = LogRemap(actor.consensus(), config.remap_name, actor.clock, rand)
        process.capture = Capture(
            config, topics=topics, catalogue=catalogue, remap=remap, clock=actor.clock, rand=rand
        )  # fmt: skip
        parts, late = (db, process.capture, actor.clock, process.tasks), fault == "late-consumer"
        if machines is None:
            process.shapes = Shapes(*parts, late=late)
        else:
            process.shapes = process.kept = KeptShapes(machines, *parts, store=machines.open(actor), late=late)
        process.running = process.tasks.spawn(process.capture.run(), name="capture")
        process.shapes.start(readers)
        return process

    capture = Actor(world, "capture", build)
    spoils = source.random() < 0.3
    async with Crew() as crew:
        watching = crew.spawn(oracle.watch())
        least, most = (2, 8) if machines is None else (8, 32) if harsh else (4, 16)
        forks = fault in FORK_FAULTS or (
            not fault and machines is None and random.Random(f"fork {world.seed}").random() < FORK_SHARE
        )
        least, most = (8, 24) if slow or forks else (least, most)

        def streams() -> bool:
            return capture.ready and capture.node.capture.streaming

        writing = [
            crew.spawn(_write(db, writer, capture, source.randint(least, most), spoils)) for writer in range(WRITERS)
        ]
        asks = source.choice((0, 0, 1, 3))
        if forks:
            writing.append(crew.spawn(failing_over(server, streams, lambda: oracle.bound, narrow=fault in NARROW)))
        writing.append(crew.spawn(_operate(db, capture, copies.choice((2, 4)) if slow else asks)))
        followers = Followers(db, capture, machines) if machines is not None else None
        following = [crew.spawn(followers.follow(n)) for n in range(source.randint(1, 3))] if followers else []
        await capture.start()
        if machines is not None:
            await machines.lives(capture, source.choice((4, 7) if harsh else (1, 2, 4, 7)))
        for _ in range(source.choice((0, 1, 2, 4)) if machines is None and fault not in NARROW else 0):
            await asyncio.sleep(source.uniform(0, 1.2) ** 2 * 2)
            capture.crash()
            await asyncio.sleep(source.uniform(0, 0.1))
            await capture.start()
        await asyncio.wait(writing)
        await asyncio.sleep(source.uniform(0, 2.0))
        _last_words(db)
        db.mend()
        await world.heal()
        await _settled(world, db, capture, oracle, SETTLES_S / 4 if fault else SETTLES_S)
        if followers is not None and not world.loop.failures:
            rows = await capture.node.catalogue.tables(NAME)
            served = any(row.state == "captured" for row in rows)  # shapes of a table that stays paused are not served
            await followers.settled(max((txn.lsn for txn in db.log if txn.sent and served), default=0), SETTLES_S)
        for each in (watching, *following):
            each.cancel()
    if not world.loop.failures:
        await oracle.check_bound()
        await oracle.check(capture.node.catalogue)


async def _write(db: Database, writer: int, capture: Actor[Process], count: int, spoils: bool) -> None:
    """Run an application: one transaction after another, most of them after the stream has begun."""
    source = db.world.source
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(source.choice((0.0, 3.0, 10.0))):
            await db.world.until(lambda: capture.ready and capture.node.capture.streaming)
    for number in range(count):
        await asyncio.sleep(source.uniform(0, 0.6) ** 2 * 2)
        txn = db.begin()
        for _ in range(source.choice((0, 1, 1, 2, 4, 9))):
            text = f"{source.choice('az')}{writer}.{number}"
            if spoils and source.random() < 0.03:
                text = source.choice((WIDE, VANISHING))
            db.write(txn, writer, text)
            db.permute(txn, writer, f"p{txn.xid}.{len(txn.edits)}")
            if source.random() < 0.2:
                await asyncio.sleep(source.uniform(0, 0.1))
        if source.random() < 0.2:
            txn.tag = f"tag-{writer}.{number}"
        db.commit(txn)
        await _shown(db, txn)


def _last_words(db: Database) -> None:
    """Commit the last transaction, which ends with changes that go to no topic."""
    txn = db.begin()
    for number in range(6):
        db.write(txn, 0, f"last.{number}", db.world.source.choice(db.captured))
    for number in range(6 if STRANGER in db.relations else 0):
        db.write(txn, 0, f"last.{number}", STRANGER)
    db.commit(txn)
    db.show(txn)


async def _operate(db: Database, capture: Actor[Process], count: int) -> None:
    """Request re-snapshots of tables, streaming or paused, as an operator."""
    source = db.world.source
    for _ in range(count):
        await asyncio.sleep(source.uniform(0, 2.0))
        name = f"public.t{source.choice(db.captured)}"
        with contextlib.suppress(TidemillError, Down):
            await capture.enter(lambda node, name=name: request_recopy(node.catalogue, NAME, name))  # type: ignore[misc]
            db.world.trace(f"asked for {name} again")


async def _shown(db: Database, txn: Txn) -> None:
    """Make a transaction visible some time after its commit: it is in the WAL, and decoded, before that."""
    source = db.world.source
    await asyncio.sleep(source.uniform(0, 0.2) if source.random() < 0.3 else 0)
    db.show(txn)


async def _settled(world: World, db: Database, capture: Actor[Process], oracle: Oracle, within_s: float) -> None:
    """Wait until all tables stream, nothing is pending and the last commit is confirmed. Raises NotLive."""

    def done() -> bool:
        node = capture.node
        facts = node.capture.facts()
        sent = max((txn.lsn for txn in db.log if txn.sent), default=0)
        reported = db.confirmed is not None and db.confirmed >= db.lsn and oracle.bound >= sent
        return reported and facts.get("pending") == {} and node.capture.streaming

    async def copied() -> bool:
        try:
            rows = await capture.node.catalogue.tables(NAME)
        except (UnavailableError, UnknownOutcomeError):
            return False
        return len(rows) == len(db.captured) and all(row.snapshot is not None and not row.recopy for row in rows)

    async def until() -> None:
        while not world.loop.failures and not (done() and await copied() and done()):
            await world.until(lambda: bool(world.loop.failures) or done())

    try:
        async with asyncio.timeout(within_s):
            await until()
    except TimeoutError as error:
        rows = await capture.node.catalogue.tables(NAME)
        raise NotLive(
            f"not settled: rows={rows} confirmed={db.confirmed} bound={oracle.bound} last={db.lsn}"
            f" facts={capture.node.capture.facts()}; {world.waiting()}"
        ) from error
