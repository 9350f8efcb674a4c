"""`tidemill shape`: errors of a node are sentences, with the exit codes of other commands."""

from __future__ import annotations

import socket
import threading
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.cli.node import node_answering
from tidemill.base.errors import InvalidError, MissingError, TidemillError, UnavailableError
from tidemill.cli import shape
from tidemill.cli.main import app


@pytest.mark.parametrize(
    ("code", "body", "kind", "said"),
    [
        (400, '{"message": "Invalid request", "errors": {"table": ["a", "b"], "where": ["c"]}}', InvalidError,
         "the node answered 400: table: a; table: b; where: c"),
        (503, '{"message": "the table is being copied"}', UnavailableError, "the node answered 503: the table is"),
        (404, "[1]", MissingError, "the node answered 404: [1]"),
        (502, "<html>bad gateway", UnavailableError, "the node answered 502: <html>bad gateway"),
        (200, "<html>", UnavailableError, "another server answers at the node's address: address=127.0.0.1:"),
        (200, '["x"]', UnavailableError, "another server answers at the node's address: address=127.0.0.1:"),
    ],
)  # fmt: skip
def test_an_error_of_the_node_is_a_sentence(
    tmp_path: Path, code: int, body: str, kind: type[TidemillError], said: str
) -> None:
    with node_answering(code, body) as address:
        (tmp_path / "tidemill.toml").write_text(f'[node]\nhttp = "{address}"\n')
        error = CliRunner().invoke(app, ["shape", "get", "t", "-c", str(tmp_path / "tidemill.toml")]).exception
    assert type(error) is kind and str(error).startswith(said), error


@pytest.mark.parametrize("secret", ["s3 cret&x", ""])
def test_the_secret_of_the_configuration_is_sent(tmp_path: Path, secret: str) -> None:
    row = '[{"key": "1", "value": {"id": "1"}, "headers": {"operation": "insert"}}]'
    ask = partial(CliRunner().invoke, app)
    for command, body in (("list", '[{"handle": "7"}]'), ("get", row)):
        with node_answering(200, body, secret=secret, headers={"electric-up-to-date": ""}) as address:
            config = tmp_path / "tidemill.toml"
            config.write_text(f'[node]\nhttp = "{address}"\n[shapes]\nsecret = "{secret}"\n')
            done = ask(["shape", command, *(["t"] if command == "get" else []), "-c", str(config)])
            assert done.exit_code == 0, (done.output, done.exception)
            if secret:
                config.write_text(f'[node]\nhttp = "{address}"\n')
                refused = ask(["shape", command, *(["t"] if command == "get" else []), "-c", str(config)])
                assert isinstance(refused.exception, InvalidError) and "401: Unauthorized" in str(refused.exception)


@pytest.mark.parametrize(("answers", "said"), [(False, "waited_s=0.2. Find out"), (True, "Start one with")])
def test_a_node_that_is_frozen_or_ends_is_a_sentence_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool, said: str
) -> None:
    monkeypatch.setattr(shape, "LIST_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "tidemill.toml").write_text(f'[node]\nhttp = "127.0.0.1:{server.getsockname()[1]}"\n')
        ask = partial(CliRunner().invoke, app, ["shape", "list", "-c", str(tmp_path / "tidemill.toml")])
        if answers:
            monkeypatch.setattr(shape, "LIST_TIMEOUT_S", 60)
            thread = threading.Thread(target=lambda: server.accept()[0].close())
            thread.start()
        error = ask().exception
    assert isinstance(error, UnavailableError) and said in str(error), error
    if answers:
        thread.join()
