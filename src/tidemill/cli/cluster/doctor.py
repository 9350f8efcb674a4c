"""`tidemill doctor`: one line per check; each failure names its fix, and hides no other check."""

from __future__ import annotations

import contextlib
import errno
import shutil
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import msgspec
import typer

from tidemill.base.address import Address
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.config import Config, advertised_addresses, exposed_servers, load
from tidemill.base.errors import CorruptError, InvalidError, MissingError, TidemillError
from tidemill.base.libraries import is_installed, require
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.private_directories import is_present
from tidemill.cli.cluster.capture_checks import check_capture
from tidemill.cli.cluster.check_results import Result, guard_check, run_check
from tidemill.cli.cluster.own_node import own_node_pid
from tidemill.cli.cluster.pipeline_checks import any_uses_spark, check_pipelines
from tidemill.cli.context import ConfigOption, ProgressBars
from tidemill.cli.output.output import TABLE, Output
from tidemill.metastore.check.findings import Findings

if TYPE_CHECKING:
    from tidemill.consensus.api import Consensus

MINIMUM_FREE_BYTES = 2 << 30
T = TypeVar("T")
Check = Callable[[Config], str]
"""Check that returns its result as text, or raises TidemillError whose `fix` says what to do."""


def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Instead, check everything that is stored and list every broken reference.")
    ] = False,
    contents: Annotated[
        bool, typer.Option("--contents", help="With --deep: read every stored byte and verify its checksum.")
    ] = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Check Python, Java, bash, disk, ports, bucket, consensus, Postgres and pipelines. Exit 1 when a check fails.

    Every check runs. The file of each pipeline and its `build` run in this process.
    """
    loaded = load(config)
    if deep or contents:
        _run_deep_check(loaded, out, contents)
    results = [run_check(name, partial(check, loaded)) for name, check in _configured_checks(loaded)]
    results += guard_check("objects.url", lambda: _check_objects(loaded))
    for name in loaded.capture:
        results += guard_check(f"capture.{name}", partial(check_capture, loaded, name))
    results += guard_check("pipelines", lambda: check_pipelines(loaded, config))
    if not out.is_text:
        out.rows(results)
    else:
        for result in results:
            mark = "ok  " if result["ok"] else "FAIL"
            print(f"{mark} {result['check']}: {result['found']}" + (f" → {result['fix']}" if result["fix"] else ""))
    raise SystemExit(0 if all(r["ok"] for r in results) else 1)


def _run_deep_check(config: Config, out: Output, contents: bool) -> NoReturn:
    """Run the deep check, with nodes up or down. Exit 0 clean, 1 with findings."""
    from tidemill.consensus.factory import open_consensus
    from tidemill.consensus.memory import MemoryConsensus
    from tidemill.maintenance.check.deep_check import deep_check
    from tidemill.objects.factory import local_directory, open_objects

    clock, rand = SystemClock(), Rand()
    directory = local_directory(config.objects_url)
    with BlockingPortal() as portal, ProgressBars() as bars:
        if directory is not None and not is_present(Path(directory)) and not _may_have_cluster(config, portal):
            raise MissingError(
                f"there is no cluster: the bucket does not exist: path={directory}.",
                fix="Correct objects.url or --config.",
            )
        objects = portal.call(open_objects(config.objects_url, clock, rand, create=False))
        consensus: Consensus
        try:
            consensus = portal.call(open_consensus(config.consensus_url, clock, rand, create=False))
        except MissingError:  # it was lost, or not restored yet: the bucket is checked alone
            consensus = MemoryConsensus(clock)
        try:
            checked = portal.call(deep_check(consensus, objects, clock, rand, contents=contents, progress=bars.update))
            if contents:
                _check_mirrors(config, checked.findings)
        finally:
            portal.call(consensus.aclose())
            portal.call(objects.aclose())
    found = checked.findings
    report: dict[str, Any] = {
        "clean": found.clean,
        "cluster": checked.cluster_uuid,
        "incarnation": checked.incarnation,
        "from_consensus": checked.from_consensus,
        "checkpoint_age_ms": checked.checkpoint_age_ms,
        "walked": dict(found.walked),
        "orphans": dict(found.orphans),
        "orphan_bytes": found.orphan_bytes,
        "findings": [msgspec.to_builtins(finding) for finding in found.broken],
    }
    if not out.is_text:
        out.rows(report["findings"], value=report)
    else:
        for finding in found.broken:
            print(f"FAIL {finding}")
        print("walked  " + "  ".join(f"{name} {count:,}" for name, count in found.walked.items()))
        if found.orphans:
            orphans = "  ".join(f"{name} {count:,}" for name, count in found.orphans.items())
            print(f"orphans {orphans}  bytes {found.orphan_bytes:,}")
        print("clean" if found.clean else f"{len(found.broken)} findings")
    raise SystemExit(0 if found.clean else 1)


def _check_mirrors(config: Config, findings: Findings) -> None:
    """Check the mirrors of pipelines whose scratch directory is below this node's data directory."""
    from tidemill.spark.merge.sorted_runs import verify_run

    paths = sorted(Path(config.node.data).glob("**/mirrors/**/run-*.arrow"))
    for number, path in enumerate(paths):
        findings.progress("contents of mirrors", number, len(paths))
        try:
            verify_run(path)
        except CorruptError as error:
            if path.exists():  # otherwise it was merged into another file during the check
                findings.add(f"mirror {path.parent.name}", str(path), error.message.rstrip("."), error.fix)
        findings.walked["mirror files"] += 1


def _configured_checks(config: Config) -> list[tuple[str, Check]]:
    fixed: list[tuple[str, Check]] = [
        ("python", _check_python),
        ("spark", _check_spark),
        ("java", _check_java),
        ("bash", _check_bash),
        ("disk", _check_disk),
        ("node.http", lambda c: _check_port(c, c.node.http, "node.http")),
        ("node.kafka", lambda c: _check_port(c, c.node.kafka, "node.kafka")),
        ("exposure", _check_exposure),
        ("advertised", _check_advertised),
        ("consensus.url", _check_consensus),
    ]
    return fixed


def _check_python(_: Config) -> str:
    return ".".join(str(part) for part in sys.version_info[:3])


def _check_spark(config: Config) -> str:
    if not config.pipeline and not is_installed("pyspark"):
        return "not needed: no pipeline is configured"
    require("pyspark")
    from tidemill.spark.session.requirements import OLDEST_SPARK, check_has_jvm, check_spark_version

    _for_spark(config, check_has_jvm)
    distribution = "pyspark" if is_installed("py4j") else "pyspark-client"
    version = version_of(distribution)
    check_spark_version(version, OLDEST_SPARK, "tidemill")
    return f"{distribution} {version}"


def _check_java(config: Config) -> str:
    from tidemill.spark.session.java import find_java

    found = _for_spark(config, find_java)
    return found if isinstance(found, str) else f"{found.build or found.major} of {found.origin}, at {found.home}"


def _check_bash(config: Config) -> str:
    from tidemill.spark.session.java import find_bash

    return _for_spark(config, find_bash)


def _for_spark(config: Config, find: Callable[[], T]) -> T | str:
    """Return what Spark needs, or why it is not needed. Raises the InvalidError of `find`."""
    if not is_installed("pyspark"):
        return "not needed: Spark is not installed"
    try:
        return find()
    except InvalidError:
        if not any_uses_spark(config):
            return "not found, and not needed: no pipeline uses Spark"
        raise


def _check_disk(config: Config) -> str:
    directory = _existing_parent(Path(config.node.data).absolute())
    free = shutil.disk_usage(directory).free
    if free < MINIMUM_FREE_BYTES:
        raise TidemillError(f"{free >> 20} MiB free below {directory}.", fix="Free at least 2 GiB, or move node.data.")
    return f"{free >> 30} GiB free below {directory}"


def _existing_parent(path: Path) -> Path:
    return next(found for found in (path, *path.parents) if found.exists())


def _check_port(config: Config, address: str, key: str) -> str:
    bound = Address.parse(address)
    with socket.socket(bound.family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(bound)
        except OSError as error:
            pid = own_node_pid(config) if error.errno == errno.EADDRINUSE else 0
            if pid:
                return f"{address} is in use by this node, which is running: pid={pid}"
            raise TidemillError(
                f"{address} cannot be bound: {error.strerror}.",
                fix=f"Stop the process that uses it (another cluster of this machine?), or change {key}.",
            ) from error
    return f"{address} is free"


def _check_exposure(config: Config) -> str:
    open_to_all = exposed_servers(config)
    if open_to_all:
        return f"WARNING: reachable from other machines without authentication: {', '.join(open_to_all)}"
    return "endpoints without authentication are reachable from this machine only"


def _check_advertised(config: Config) -> str:
    addresses = advertised_addresses(config)
    found = " ".join(f"{key}={address}" for key, address in addresses.items())
    bound = {"node.http": config.node.http, "node.kafka": config.node.kafka}
    open_to_all = {key for key, address in bound.items() if address and Address.parse(address).is_wildcard}
    if any(address.is_wildcard or (address.is_loopback and key in open_to_all) for key, address in addresses.items()):
        return (
            f"WARNING: other machines are sent to an address that they cannot open: {found}."
            " Set node.advertised_host to a name that clients resolve"
        )
    return f"clients are sent to {found}"


def _check_objects(config: Config) -> list[Result]:
    """Return one result per probe of the object store. A local directory that does not exist is not created.
    Before there is a cluster, a temporary one on the same file system is probed; later, the check fails."""
    from tidemill.objects.factory import local_directory
    from tidemill.objects.probe import probe_url

    url = config.objects_url
    with BlockingPortal() as portal, contextlib.ExitStack() as stack:
        has_cluster = _may_have_cluster(config, portal)
        with contextlib.suppress(TidemillError, OSError):  # the probe reports it
            directory = local_directory(url)
            if directory is not None and not has_cluster and not is_present(Path(directory)):
                parent = _existing_parent(Path(directory))
                url = stack.enter_context(TemporaryDirectory(prefix=".tidemill-probe-", dir=parent))
        checks = portal.call(probe_url(url, SystemClock(), Rand(), create=not has_cluster))
    return [{"check": check.name, "ok": check.ok, "found": check.detail, "fix": check.fix} for check in checks]


def _may_have_cluster(config: Config, portal: BlockingPortal) -> bool:
    """Return whether consensus has a cluster; also True if it does not answer."""
    from tidemill.consensus.factory import open_consensus
    from tidemill.metastore.cluster import REGISTER

    try:
        consensus = portal.call(open_consensus(config.consensus_url, SystemClock(), Rand(), create=False))
    except TidemillError as error:
        return not isinstance(error, MissingError)
    try:
        return portal.call(consensus.head(REGISTER)) is not None
    except TidemillError:
        return True
    finally:
        portal.call(consensus.aclose())


def _check_consensus(config: Config) -> str:
    from tidemill.consensus.factory import open_consensus

    with BlockingPortal() as portal:
        try:
            consensus = portal.call(open_consensus(config.consensus_url, SystemClock(), Rand(), create=False))
        except MissingError:
            return "there is no cluster yet; tidemill up creates it"
        try:
            nodes = portal.call(consensus.leases("node/"))
        finally:
            portal.call(consensus.aclose())
    return f"{config.consensus_url.partition(':')[0]} answers; live nodes: {sum(lease.live for lease in nodes)}"
