"""Shared parts of every command: exit codes, groups of options, configuration and stores, questions, progress bars.

    exit code   meaning
    0           good: done, equal, fresh
    1           a check failed, tables differ, or data lags behind its source
    2           bad input: an option, a name, the configuration; or no cluster at this place
    3           stuck: a stage does not advance, or its process is silent
    4           unavailable: a store or a server does not answer, no process of the cluster runs, or a table has not
                been computed yet
    130         interrupted with Ctrl-C

Rooms are imported inside functions: `tidemill --help` must not pay for pyarrow, psycopg or the stores.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tidemill.base.address import without_credentials
from tidemill.base.clock import Clock, Rand, SystemClock
from tidemill.base.config.config import Config, find_file, load
from tidemill.base.errors import (
    CorruptError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.status.freshness import EXIT_BY_STATE
from tidemill.base.status.status import StageState
from tidemill.cli.output.output import Output

if TYPE_CHECKING:
    from tidemill.consensus.api import Consensus
    from tidemill.metastore.catalogue import Catalogue
    from tidemill.metastore.metastore import Metastore
    from tidemill.objects.store import ObjectStore
    from tidemill.shards.handle import LogShard

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="Path of tidemill.toml.")]
Value = TypeVar("Value")
OldForce = Annotated[bool, typer.Option("--yes-really", hidden=True)]
"""Earlier name of --force."""

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show what would happen; change nothing.")]

EXIT_GOOD = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_STUCK = EXIT_BY_STATE[StageState.STUCK]
EXIT_UNAVAILABLE = 4
EXIT_INTERRUPTED = 130


def exit_code_of(error: TidemillError) -> int:
    """Return the exit code of a command that ends with this error."""
    if isinstance(error, UnavailableError | UnknownOutcomeError):
        return EXIT_UNAVAILABLE
    return EXIT_FAILED if isinstance(error, CorruptError) else EXIT_BAD_INPUT


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that is a dataclass by the options of its fields. Typer reads flat signatures
    only. `main` does this for every command."""
    groups: dict[str, type] = {}
    flat: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = parameter.annotation
        if isinstance(group, type) and dataclasses.is_dataclass(group):
            groups[parameter.name] = group
            flat += inspect.signature(group, eval_str=True).parameters.values()
        else:
            flat.append(parameter)
    if not groups:
        return command

    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        command(**given)

    run.__doc__ = command.__doc__
    # By keyword, because a required option may follow one with a default.
    by_keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in flat]
    run.__signature__ = inspect.Signature(by_keyword)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


class OpenConsensus:
    """Consensus of a configuration, called synchronously through a portal. It is enough for commands that report
    status, and works while the bucket is unavailable."""

    def __init__(self, config: Config, portal: BlockingPortal, consensus: Consensus) -> None:
        self.config = config
        self.portal = portal
        self.consensus = consensus
        self.clock: Clock = SystemClock()
        self.rand = Rand()


class OpenStores(OpenConsensus):
    """Consensus, the object store and, on first use, the metastore."""

    def __init__(self, config: Config, portal: BlockingPortal, consensus: Consensus, objects: ObjectStore) -> None:
        super().__init__(config, portal, consensus)
        self.objects = objects

    @cached_property
    def metastore(self) -> Metastore:
        """Metastore, opened at the first use: most commands need none."""
        from tidemill.metastore.factory import create_metastore

        domains = self.config.metastore.domains
        return create_metastore(self.consensus, self.objects, self.clock, self.rand, domains=domains)

    @property
    def catalogue(self) -> Catalogue:
        from tidemill.metastore.catalogue import Catalogue

        return Catalogue(self.metastore, self.clock, self.rand)

    def close(self) -> None:
        if "metastore" in self.__dict__:
            self.portal.call(self.metastore.aclose())

    def shard(self, name: str) -> LogShard:
        """Open an existing shard. Raises MissingError."""
        from tidemill.shards.registry import open_shard

        return self.portal.call(open_shard(self.consensus, self.objects, self.clock, self.rand, name))


OPEN_TIMEOUT_S = 2.5
"""Time within which a command that reports status must get a connection. An engine's own error message comes within two
seconds."""


@contextmanager
def open_consensus_only(
    path: Path | None, within_s: float | None = None, *, create: bool = False
) -> Iterator[OpenConsensus]:
    """Open the consensus that the configuration names, and close it at the end.

    `create` is for commands that prepare a cluster before its first start; they need a configuration file, so that a
    wrong directory does not become a cluster. Raises InvalidError with the key and the fix, MissingError when there is
    no cluster, and UnavailableError when consensus is not open `within_s`.
    """
    from tidemill.base.status.logging import configure_logs
    from tidemill.consensus.factory import open_consensus

    configure_logs("warning")  # a command that leads for a moment has nothing to report about it
    config = load(path)
    with BlockingPortal() as portal:
        created = create and find_file(path) is not None
        opening = open_consensus(config.consensus_url, SystemClock(), Rand(), create=created)
        try:
            consensus = portal.call(opening, within_s)
        except MissingError as error:
            raise no_cluster(path, config, error) from error
        except TimeoutError as error:
            raise UnavailableError(
                f"consensus does not answer: consensus.url={_redacted_url(config.consensus_url)!r}"
                f" waited_s={within_s:g}{_sqlite_blocker(config.consensus_url)}.",
                fix="Check that its server runs and can be reached.",
            ) from error
        try:
            yield OpenConsensus(config, portal, consensus)
        finally:
            portal.call(consensus.aclose())


def no_cluster(path: Path | None, config: Config, error: MissingError) -> MissingError:
    """Return the error for a place without a cluster: consensus was lost, nothing was started there yet, or the
    directory is wrong."""
    from tidemill.objects.factory import local_directory

    file, bucket = find_file(path), local_directory(config.objects_url)
    if bucket is not None and any(Path(bucket, "metastore", "cluster").glob("*")):
        return MissingError(
            f"{error.message.rstrip('.')}, but the bucket has one: bucket={bucket}.",
            fix="Restore the cluster: tidemill restore",
        )
    if file is not None:
        return MissingError(
            f"the cluster of {file} was never started: {error.message}", fix=f"Start it: tidemill up --config {file}"
        )
    return MissingError(
        f"no cluster here: directory={Path.cwd()} has neither tidemill.toml nor the data of a cluster.",
        fix="Change to its directory, or add --config FILE; `tidemill up` starts a cluster in this directory.",
    )


def _sqlite_blocker(url: str) -> str:
    """Return the process that SQLite's answer waits for, as fields of a message; "" for other engines."""
    from tidemill.consensus.factory import sqlite_path_of_url
    from tidemill.consensus.sqlite.lock_holders import describe_delaying_process

    file = sqlite_path_of_url(url)
    return f" {describe_delaying_process(file)}" if file is not None else ""


def _redacted_url(url: str) -> str:
    """Return a URL of consensus without its password."""
    if url.startswith("sqlite:"):
        return url
    if not url.startswith(("postgres:", "postgresql:")):
        return without_credentials(url)
    from tidemill.consensus.postgres.connections import without_password

    return without_password(url)


@contextmanager
def open_stores(path: Path | None, *, create: bool = False) -> Iterator[OpenStores]:
    """Open the stores that the configuration names, and close them at the end. `create` and errors: see
    `open_consensus_only`."""
    with open_consensus_only(path, create=create) as opened, open_stores_of(opened) as found:
        yield found


@contextmanager
def open_stores_of(opened: OpenConsensus) -> Iterator[OpenStores]:
    """Open the other stores of a cluster whose consensus is open, and close them at the end."""
    from tidemill.metastore.factory import open_bucket

    portal = opened.portal
    objects = portal.call(open_bucket(opened.consensus, opened.config.objects_url, opened.clock, opened.rand))
    try:
        found = OpenStores(opened.config, portal, opened.consensus, objects)
        try:
            yield found
        finally:
            found.close()
    finally:
        portal.call(objects.aclose())


def either_name(given: Value, earlier: Value, name: str, earlier_name: str) -> Value:
    """Return the value of an option that was given under its name or under its earlier one. Raises InvalidError for
    both."""
    if given and earlier:
        raise InvalidError(f"the option was given twice: {name} {earlier_name}.", fix=f"Give only {name}.")
    return given or earlier


def is_terminal() -> bool:
    """Return whether a person can answer a question."""
    return sys.stdin.isatty()


def confirm(question: str, *, yes: bool, out: Output) -> None:
    """Ask for confirmation on a terminal. Raises InvalidError unless the user agrees, without a terminal, and if the
    output is for a program."""
    if yes:
        return
    if not out.is_text or not is_terminal():
        raise InvalidError(f"nothing was done, because it was not confirmed: {question}", fix="Add --yes.")
    if not typer.confirm(question):
        raise InvalidError("nothing was done.", fix="Answer y, or add --yes.")


DRY_RUN = {"dry_run": True}
"""Fields that every row of a dry run has, as JSON, JSON lines or CSV."""


def preview(out: Output, row: dict[str, Any], sentence: str) -> None:
    """Print the result that a command would have, for --dry-run."""
    out.one({**DRY_RUN, **row}, f"dry run: {sentence}")


class ProgressBars:
    """Progress bars, one per step, on stderr; a context manager. Nothing is shown when stderr is not a terminal.
    `remaining` shows the estimated time left instead of the elapsed time."""

    def __init__(self, *, remaining: bool = False) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(),
            TimeRemainingColumn() if remaining else TimeElapsedColumn(),
            console=Console(stderr=True), disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self._tasks: dict[str, Any] = {}

    def update(self, what: str, done: int, total: int) -> None:
        """Show the progress of one step. A `total` of 0 is unknown."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total or None)
        self._progress.update(self._tasks[what], completed=done, total=total or None)

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
