"""Checks of captured databases for `tidemill doctor`."""

from __future__ import annotations

import contextlib

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.config import Config
from tidemill.base.errors import TidemillError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.cli.cluster.check_results import Result, failed, passed

PREPARATION_REQUESTED = "an administrator was asked to prepare it"


def check_capture(config: Config, name: str) -> list[Result]:
    """Return every problem of a captured database, or one line about it. Raises UnavailableError."""
    from tidemill.capture.config import CaptureConfig
    from tidemill.capture.setup.privileges import diagnose_capture

    section = config.capture[name]
    with BlockingPortal() as portal:
        settings = CaptureConfig(
            name, section.dsn, tuple(section.tables), identity=section.identity, manual=section.manual,
            failover=section.failover, envelope=section.envelope, cleanup=section.cleanup,
        )  # fmt: skip
        diagnosing = diagnose_capture(settings, lambda asked: store_prior_identities(config, name, asked))
        line, problems = portal.call(diagnosing)
    key = f"capture.{name}"
    return [failed(key, problem) for problem in problems] or [passed(key, line)]


async def store_prior_identities(config: Config, capture: str, asked: dict[str, dict[int, tuple[str, str]]]) -> None:
    """Store the replica identities that tables have before an administrator sets FULL, for `capture list` and `capture
    drop`. If the stores do not answer, the identities are only printed."""
    if not asked:
        return  # only what has to be remembered creates the stores of a cluster that was never started
    from tidemill.base.status.logging import configure_logs
    from tidemill.capture.setup.publication import with_asked_identities
    from tidemill.consensus.factory import open_consensus
    from tidemill.metastore.catalogue import CaptureTableRow, Catalogue
    from tidemill.metastore.factory import create_metastore, open_bucket

    configure_logs("warning")  # a command that leads for a moment has nothing to report about it
    clock, rand = SystemClock(), Rand()
    with contextlib.suppress(TidemillError):
        async with contextlib.AsyncExitStack() as opened:
            consensus = await open_consensus(config.consensus_url, clock, rand)
            opened.push_async_callback(consensus.aclose)
            objects = await open_bucket(consensus, config.objects_url, clock, rand)
            opened.push_async_callback(objects.aclose)
            metastore = create_metastore(consensus, objects, clock, rand, domains=config.metastore.domains)
            opened.push_async_callback(metastore.aclose)
            catalogue = Catalogue(metastore, clock, rand)
            for table, identities in asked.items():

                def with_identities(
                    found: CaptureTableRow | None, name: str = table, seen: dict[int, tuple[str, str]] = identities
                ) -> CaptureTableRow:
                    return with_asked_identities(
                        found or CaptureTableRow(capture, name, state="refused", reason=PREPARATION_REQUESTED), seen
                    )

                await catalogue.change_table(capture, table, with_identities)
