"""The pages for new users, executed: a directory, a shell, a browser and a database, as a reader has them.

    console   commands of one shell, whose directory and environment persist; `tidemill up` in the background, to ^C
    sql       in the database `shop`, as its administrator
    text      what a browser shows at the address in the title
    others    files of the directory, named by the title; without a title an excerpt of a file that exists

The addresses and the DSN of the pages are replaced by those of this run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psycopg

from support.console.browser import WAIT_MS, chromium
from support.docs.blocks import Block, Command, commands_of, shows
from support.ports import free_port
from support.postgres import EmbeddedPostgres
from support.replication_slots import drop_slots
from support.waiting import DEADLINE_S, eventually
from tidemill.node.supervise.supervisor import launch_command

DATABASE = "shop"
ROLE = "tidemill"
READING = ("tidemill sql", "python ")
"""Commands that are repeated until they print what the page shows: Spark takes a while to start, and a table is some
seconds behind its source."""
COMMAND_S = 2 * DEADLINE_S
"""Deadline of a command: an installation takes minutes."""
ENDS_WITHIN_S = DEADLINE_S


class Walk:
    """Reader of the pages, in `directory/shop`; a context manager. `log` gets each command with its time."""

    def __init__(
        self,
        directory: Path,
        server: EmbeddedPostgres,
        environ: Mapping[str, str],
        log: Callable[[str], None] = print,
        replaced: Mapping[str, str] = {},
    ) -> None:
        """Initialise. `replaced`: programs of the pages, with others that do the same."""
        self._directory = directory / "shop"
        self._directory.mkdir()
        self._state, self._up_log = directory / "state", directory / "up.log"
        self._server = server
        self._programs = replaced
        http, kafka = free_port(), free_port()
        self._environ = {
            **environ,
            "PWD": str(self._directory),
            "TIDEMILL_NODE__HTTP": f"127.0.0.1:{http}",
            "TIDEMILL_NODE__KAFKA": f"127.0.0.1:{kafka}",
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        self._replaced = {
            "127.0.0.1:8600": f"127.0.0.1:{http}",
            "127.0.0.1:9092": f"127.0.0.1:{kafka}",
            "localhost:5432": f"127.0.0.1:{server.port}",
        }
        self._log = log
        self._up: subprocess.Popen[bytes] | None = None
        self.commands = 0
        """Number of commands that a reader types: of the shell, and blocks of SQL."""

    def __enter__(self) -> Self:
        with psycopg.connect(self._server.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {DATABASE}")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._interrupt()
        finally:
            drop_slots(self._server.dsn_for(DATABASE))
            with psycopg.connect(self._server.dsn, autocommit=True) as connection:
                connection.execute(f"DROP DATABASE {DATABASE} WITH (FORCE)")
                connection.execute(f"DROP ROLE IF EXISTS {ROLE}")

    def run(self, block: Block) -> None:
        """Execute one block. Raises AssertionError if it fails or its output is not the one shown."""
        text = self._replace(block.text)
        if block.language == "console":
            if block.text == "^C\n":
                assert self._up is not None, f"{block}: nothing runs"
                self._interrupt()
            for command in commands_of(block):
                self._run_command(block, command)
        elif block.language == "sql":
            self.commands += 1
            with psycopg.connect(self._server.dsn_for(DATABASE), autocommit=True) as connection:
                connection.execute(text.encode())
        elif block.language == "text":
            self._see(block, self._replace(block.title), text)
        elif block.title:
            self._write(block)
        else:
            kept = [path.read_text() for path in self._directory.iterdir() if path.suffix == f".{block.language}"]
            lines = [line for line in text.splitlines() if line]
            assert any(all(line in each for line in lines) for each in kept), f"{block}: no file has it"

    def _write(self, block: Block) -> None:
        """Write a file, or compare it with the one that a command has written."""
        path = self._directory / block.title
        if path.exists():
            assert path.read_text() == block.text, f"{block}: {block.title} is\n{path.read_text()}"
        else:
            path.write_text(block.text)

    def _run_command(self, block: Block, command: Command) -> None:
        self.commands += 1
        began_s = time.monotonic()
        line = self._replace(command.line)
        for shown, real in self._programs.items():
            line = line.replace(shown, real)
        if line == "tidemill up":
            output = self._start(command)
        else:
            code, output = self._shell(line)
            until_s = began_s + COMMAND_S
            while line.startswith(READING) and (code or not shows(command.output, output)):
                assert time.monotonic() < until_s, f"{block}: $ {line} exited with {code}\n{output}"
                time.sleep(1)
                code, output = self._shell(line)
            assert code == 0, f"{block}: $ {line} exited with {code}\n{output}"
        self._log(f"$ {line}\n{output.rstrip()}\n  [{time.monotonic() - began_s:.0f} s]")
        assert shows(command.output, output), f"{block}: $ {line} printed\n{output}"

    def _shell(self, line: str) -> tuple[int, str]:
        """Run a command; the next one has its directory and its environment. Return its exit code and its output, with
        its errors if it fails."""
        script = f"{line}\ncode=$?\n{{ pwd; env -0; }} > {self._state}\nexit $code"
        done = subprocess.run(
            ["bash", "-c", script], cwd=self._environ["PWD"], env=self._environ, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=COMMAND_S,
        )  # fmt: skip
        pwd, _, variables = self._state.read_text().partition("\n")
        self._environ = {**dict(each.split("=", 1) for each in variables.split("\0") if each), "PWD": pwd}
        return done.returncode, self._restore(done.stdout + (done.stderr if done.returncode else ""))

    def _start(self, command: Command) -> str:
        """Start the cluster, and return what it has printed when that is what the page shows."""
        with self._up_log.open("wb") as log:
            self._up = subprocess.Popen(
                launch_command(["bash", "-c", f"exec {command.line}"]), cwd=self._environ["PWD"],
                env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        eventually(lambda: shows(command.output, self._printed()), self._printed, COMMAND_S, pause_s=0.2)
        return self._printed()

    def _printed(self) -> str:
        """Return what the cluster has printed so far."""
        return self._restore(self._up_log.read_text())

    def _interrupt(self) -> None:
        process, self._up = self._up, None
        if process is None:
            return
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(ENDS_WITHIN_S) == 0, self._up_log.read_text()
        finally:
            if process.poll() is None:
                process.kill()

    def _see(self, block: Block, url: str, text: str) -> None:
        """Open an address in a browser, and wait until it shows every line."""
        with chromium() as browser, _page(browser) as page:
            page.goto(url)
            lines = text.splitlines()
            condition = "(lines) => lines.every((line) => document.body.innerText.includes(line))"
            try:
                page.wait_for_function(condition, arg=lines, timeout=WAIT_MS)
            except Exception as error:
                error.add_note(f"{block}: {url} shows\n{page.locator('body').inner_text()[:2000]}")
                raise
        self._log(f"Chromium at {url} shows: {' | '.join(lines)}")

    def _restore(self, text: str) -> str:
        """Return an output with the addresses of the pages."""
        for shown, real in self._replaced.items():
            text = text.replace(real, shown)
        return text

    def _replace(self, text: str) -> str:
        for shown, real in self._replaced.items():
            text = text.replace(shown, real)
        return text


@contextmanager
def _page(browser: Any) -> Any:
    page = browser.new_page()
    try:
        yield page
    finally:
        page.close()


def clean_environ(**more: str) -> dict[str, str]:
    """Return the environment of a user who has neither a cluster nor a virtual environment."""
    names = ("HOME", "LANG", "LC_ALL", "TMPDIR", "USER", "LD_LIBRARY_PATH")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    # How this machine reaches package indexes: proxies, mirrors, certificates.
    way_out = ("PIP_", "UV_", "HTTP", "SSL_CERT_")
    reached = {name: value for name, value in os.environ.items() if name.upper().startswith(way_out)}
    return {**kept, **reached, "PATH": os.defpath + ":/usr/local/bin", "PYTHONHASHSEED": "0", **more}


def path_with(python: str = sys.executable) -> str:
    """Return a PATH on which the commands of this Python's environment come first."""
    return f"{Path(python).parent}:{os.environ['PATH']}"
