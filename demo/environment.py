"""The demo's directory: data of Postgres, the bucket and consensus, logs, and a configuration file.

A second run resumes the directory; `--fresh` removes it first. A marker file protects directories of other programs.
The configuration is an ordinary one: `tidemill status --config DIR/tidemill.toml` works during the run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from demo import shop
from demo.postgres import Postgres
from tidemill.base.clock import Rand
from tidemill.base.config.config import Config, load
from tidemill.base.errors import InvalidError

MARKER = "harbour-shop"
DATABASE = "shop"


class Environment(msgspec.Struct):
    directory: Path
    postgres: Postgres
    config: Config
    config_path: Path
    dsn: str
    resumed: bool


def prepare(
    directory: Path,
    *,
    http: str,
    kafka: str,
    fresh: bool,
    consensus_url: str = "",
    objects_url: str = "",
    master: str = "local[*]",
) -> Environment:
    """Start Postgres, create the shop if needed, and write the configuration.

    Raises InvalidError for an unusable directory.
    """
    directory = directory.absolute()
    _claim(directory, fresh=fresh)
    resumed = (directory / "postgres" / "PG_VERSION").exists()
    postgres = Postgres(directory / "postgres")
    postgres.start()
    try:
        _create_database(postgres)
        dsn = postgres.dsn_for(DATABASE)
        shop.create(dsn, Rand(7))
        config_path = directory / "tidemill.toml"
        config_path.write_text(
            _toml(
                directory,
                dsn,
                http=http,
                kafka=kafka,
                consensus_url=consensus_url,
                objects_url=objects_url,
                master=master,
            ),
            encoding="utf-8",
        )
        return Environment(directory, postgres, load(config_path), config_path, dsn, resumed)
    except BaseException:
        postgres.stop()
        raise


def _claim(directory: Path, *, fresh: bool) -> None:
    marker = directory / MARKER
    if fresh and directory.exists():
        if not marker.exists() and any(directory.iterdir()):
            raise InvalidError(
                f"--fresh would delete a directory that is not a demo's: data={directory}.",
                fix="Name another with --data.",
            )
        shutil.rmtree(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        raise InvalidError(
            f"cannot write the demo's directory: data={directory} error={error.strerror}.",
            fix="Make it writable, or name another with --data.",
        ) from error


def _create_database(postgres: Postgres) -> None:
    import psycopg

    with psycopg.connect(postgres.dsn_for("postgres"), autocommit=True) as connection:
        found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone()
        if found is None:
            connection.execute(f"CREATE DATABASE {DATABASE}".encode())


def _toml(
    directory: Path, dsn: str, *, http: str, kafka: str, consensus_url: str, objects_url: str, master: str
) -> str:
    pipeline, page = Path(__file__).with_name("pipeline.py"), Path(__file__).with_name("page")
    tables = ", ".join(f'"public.{table}"' for table in shop.TABLES)
    return f"""# Harbour Shop, written by `./dev demo`.
[node]
name = "harbour"
data = "{directory}"
http = "{http}"
kafka = "{kafka}"

[http.pages]
demo = "{page}"

[objects]
url = "{objects_url}"

[consensus]
url = "{consensus_url}"

[capture.shop]
dsn = "{dsn}"
tables = [{tables}]

[topics.clicks]
partitions = 4

[pipeline.shop]
file = "{pipeline}"

[spark]
master = "{master}"
"""
