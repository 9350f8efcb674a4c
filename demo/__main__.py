"""`./dev demo`: Harbour Shop, end to end, in one terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tidemill.base.address import Address
from tidemill.base.errors import InvalidError
from tidemill.cli.main import run_application
from tidemill.cli.output.output import JSON, JsonOption

if TYPE_CHECKING:
    from demo.latency_report import Report
    from demo.runner import Runner


def demo(
    seconds: Annotated[
        float | None,
        typer.Option("--for", help="Seconds of load, followed by drain and verification. Default: run until Ctrl-C."),
    ] = None,
    crash: Annotated[
        bool, typer.Option(help="Kill (SIGKILL) the node and the Spark driver alternately during the load.")
    ] = False,
    fresh: Annotated[bool, typer.Option(help="Start from scratch instead of resuming.")] = False,
    data: Annotated[Path, typer.Option(help="Directory for the demo's data.")] = Path(".tidemill/demo"),
    http: Annotated[str, typer.Option(help="Address of the web pages and the shapes.")] = "127.0.0.1:8600",
    kafka: Annotated[str, typer.Option(help="Address of the Kafka endpoint.")] = "127.0.0.1:9092",
    rate: Annotated[float, typer.Option(help="Shop transactions a second.", min=0)] = 300,
    clicks: Annotated[float, typer.Option(help="Clicks a second.", min=0)] = 2000,
    objects: Annotated[str, typer.Option(help="Bucket URL, instead of a local directory.")] = "",
    consensus: Annotated[str, typer.Option(help="Consensus URL, instead of SQLite.")] = "",
    nodes: Annotated[int, typer.Option(help="Number of nodes; further nodes use the next ports.", min=1, max=9)] = 1,
    stuck_after: Annotated[
        float,
        typer.Option(help="Seconds for which a stage may be stuck without a report; more on a slow machine.", min=0),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Run the Harbour Shop demo: Postgres, a Kafka click stream, a PySpark pipeline and a live page, verified at the
    end.

    Exit 0 only if every table equals its source and nothing was stuck.
    """
    from demo.environment import prepare
    from demo.runner import Runner
    from tidemill.node.supervise.processes import offset_port

    if seconds is not None and seconds <= 0:
        raise InvalidError(f"--for must be above 0: for={seconds}.", fix="Give seconds, e.g. --for 90.")
    for number in range(nodes):
        check_port(offset_port(http, number), "--http")
        check_port(offset_port(kafka, number), "--kafka")
    _print_progress("Harbour Shop: starting PostgreSQL and the shop's tables")
    environment = prepare(data, http=http, kafka=kafka, fresh=fresh, objects_url=objects, consensus_url=consensus)
    try:
        _print_progress(f"{'resuming' if environment.resumed else 'new'} in {environment.directory}; logs in its logs/")
        _print_progress(f"the shop: http://{http}/demo/   its cluster: http://{http}/")
        _print_progress(f"Kafka: {kafka}   Postgres: {environment.dsn}")
        _print_progress(f"also: tidemill status --config {environment.config_path}")
        runner = Runner(environment, rate=rate, click_rate=clicks, crash=crash, nodes=nodes, stuck_after_s=stuck_after)
        report = asyncio.run(_run(runner, seconds))
    finally:
        environment.postgres.stop()
    if seconds is None:
        return
    if as_json:
        JSON.one(msgspec.to_builtins(report), "")
    else:
        _print_report(report)
    raise SystemExit(0 if report.clean else 1)


async def _run(runner: Runner, seconds: float | None) -> Report:
    from demo.terminal import live_view

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, runner.stop)
    async with live_view(runner):
        return await runner.run(seconds)


def check_port(address: str, option: str) -> None:
    """Raise InvalidError when the address cannot be bound, before anything is created."""
    import socket

    try:
        bound = Address.parse(address)
    except ValueError as error:
        raise InvalidError(f"not an address: {option}={address}.", fix=f"{str(error).capitalize()}.") from error
    with socket.socket(bound.family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(bound)
        except OSError as error:
            raise InvalidError(
                f"cannot listen: {option}={address} error={error}.",
                fix=f"Stop the process that uses it, or choose another {option}.",
            ) from error


def _print_progress(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


def _print_report(report: Report) -> None:
    for table, counts in report.verify.items():
        print(f"{table:24} " + "  ".join(f"{key} {value:,}" for key, value in counts.items()))
    print(
        f"transactions {report.transactions:,}  records {report.produced:,}  malformed {report.malformed}"
        f"  dead letters {report.dead_letters}  crashes {report.crashes}  money checks {report.money_checks}"
    )
    print(f"commit to table  p50 {report.commit_to_shard_ms['p50']} ms  p99 {report.commit_to_shard_ms['p99']} ms")
    print(f"commit to client p50 {report.commit_to_client_ms['p50']} ms  p99 {report.commit_to_client_ms['p99']} ms")
    print("clean" if report.clean else f"NOT CLEAN {' '.join(report.stuck)}")


if __name__ == "__main__":
    command_line = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    command_line.command()(demo)
    run_application(lambda: command_line(prog_name="./dev demo"))
