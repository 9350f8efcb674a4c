"""The pid of the running node of a configuration, for commands that must not take it for a stranger."""

from __future__ import annotations

import ssl
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import Request

import msgspec

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.config import Config
from tidemill.base.errors import MissingError, TidemillError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.status.status import NODE, StatusReport, process_exists, this_process
from tidemill.cli.cluster.ready_block import local_url
from tidemill.cli.shape import open_node

PROBE_TIMEOUT_S = 3.0


class StatusReply(msgspec.Struct):
    """Part of the response of `/api/status`: pid by process."""

    processes: dict[str, int] = {}


def own_node_pid(config: Config) -> int:
    """Return the pid of the running node of this configuration; 0 when it does not run, or its address belongs to
    another process.

    A server may answer at the address without telling who it is: it requires a token or a certificate, does not answer
    in time, or is no node. Then the last report of this node in consensus decides, as long as its process exists here.
    """
    process = f"{NODE}{config.node.name}"
    pid = _pid_by_http(config, process)
    if pid == 0:
        return 0
    try:
        report = _last_report(config, process)
    except MissingError:
        return 0
    except TidemillError:
        return pid or 0
    if report is None:
        return 0
    if pid is None:
        return report.pid if _is_running_here(report) else 0
    # The nodes of two clusters that `tidemill init` wrote have the same name and addresses.
    return pid if pid == report.pid else 0


def _pid_by_http(config: Config, process: str) -> int | None:
    """Return the pid of a process as the node's HTTP server reports it: 0 if no server accepts connections or it knows
    no such process, None if the server does not say."""
    context = None
    if config.http.tls:  # with any certificate: nothing secret is sent, and consensus confirms the answer
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with open_node(Request(f"{local_url(config)}/api/status"), PROBE_TIMEOUT_S, context) as answer:
            return msgspec.json.decode(answer.read(), type=StatusReply).processes.get(process, 0)
    except (HTTPError, HTTPException, TimeoutError, ConnectionResetError, ssl.SSLError, ValueError):
        return None
    except URLError as error:
        return None if isinstance(error.reason, TimeoutError | ConnectionResetError | ssl.SSLError) else 0
    except OSError:
        return 0


def _last_report(config: Config, process: str) -> StatusReport | None:
    """Return the last report of a process in the consensus of this configuration, without statuses. Raises what
    `open_consensus` raises."""
    from tidemill.consensus.factory import open_consensus
    from tidemill.consensus.status.board import StatusBoard

    with BlockingPortal() as portal:
        consensus = portal.call(open_consensus(config.consensus_url, SystemClock(), Rand(), create=False))
        try:
            return portal.call(StatusBoard(consensus, Rand()).last_report_head(process))
        finally:
            portal.call(consensus.aclose())


def _is_running_here(report: StatusReport) -> bool:
    """Return whether the process of a report exists on this machine, and did not leave in order. This process itself
    only has the pid of an earlier one, as the first process of a container that was restarted."""
    own_pid, host = this_process()
    return not report.left and report.host == host and report.pid != own_pid and process_exists(report.pid)
