"""The wheel in an empty environment: the packages of each extra, and one command of each. The test downloads
packages."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from support.cli.cluster import Cluster
from tidemill import __version__
from tidemill.base.libraries import EXTRA_OF

ROOT = Path(__file__).parents[2]
UV = str(Path(sys.executable).with_name("uv"))
READER_BYTES = 300 << 20
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(UV, "build", "--quiet", "--no-cache", "--out-dir", str(out), str(ROOT), cwd=out)
    assert len(list(out.glob("*.tar.gz"))) == 1, "the source distribution"
    (found,) = out.glob("*.whl")
    return found


def test_every_module_that_may_be_missing_is_in_its_extra() -> None:
    names = {"google": "googleapis-common-protos", "grpc_tools": "grpcio-tools", "confluent_kafka": "confluent-kafka"}
    for module, extra in EXTRA_OF.items():
        declared = [line.partition(">")[0].partition("=")[0] for line in PROJECT["optional-dependencies"][extra]]
        assert names.get(module, module) in declared, (module, extra)


@pytest.mark.extended
def test_the_wheel_holds_the_product_alone_with_its_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        (path,) = [name for name in files if name.endswith("/METADATA")]
        metadata = Parser().parsestr(archive.read(path).decode())
    tops = {name.split("/")[0] for name in files}
    assert tops == {"tidemill", "pyspark_tidemill", f"tidemill-{__version__}.dist-info"}, tops
    assert "tidemill/py.typed" in files and not [name for name in files if "/tests/" in name or "/demo/" in name]
    assert metadata["Name"] == "tidemill" and metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra") or []) >= {"node", "duckdb", "polars", "spark", "spark-local", "all"}
    assert "# tidemill" in metadata.get_payload()[:200]


LOWEST = """
import tidemill, tidemill.node.node, tidemill.capture.session.capture, tidemill.kafka.handlers, tidemill.registry.http
table = tidemill.connect().table("orders")
print(table.to_arrow().num_rows, table.to_polars().height)
"""


@pytest.mark.extended
def test_the_lowest_declared_versions_work_together(wheel: Path, tmp_path: Path) -> None:
    """The lock holds recent versions; an environment of a user may hold those of the declared lower bounds."""
    Cluster(tmp_path).append([(1, "a", 1), (2, "b", 1)])
    environment = tmp_path / "env"
    run(sys.executable, "-m", "venv", "--without-pip", str(environment), cwd=tmp_path)
    python, tidemill = str(environment / "bin" / "python"), str(environment / "bin" / "tidemill")
    target = f"tidemill[node,duckdb,polars] @ file://{wheel}"
    lowest = ["--resolution", "lowest-direct", "--no-cache", "--python", python]
    bounds = tmp_path / "pyproject.txt"
    bounds.write_text("\n".join([target, *direct_requirements("node", "duckdb", "polars")]))
    run(UV, "pip", "install", "--quiet", *lowest, "-r", str(bounds), cwd=tmp_path)
    installed = run(UV, "pip", "list", "--format", "json", "--python", python, cwd=tmp_path).stdout
    versions = {each["name"]: each["version"] for each in json.loads(installed)}
    assert versions["pyarrow"].startswith("22.") and versions["typer"].startswith("0.20."), versions
    assert run(python, "-c", LOWEST, cwd=tmp_path).stdout == "2 2\n"
    assert run(tidemill, "sql", "SELECT count(*) AS n FROM orders", "-o", "csv", cwd=tmp_path).stdout == "n\n2\n"
    for line in ("topic create clicks", "acl add User:a read topic:t", "group list", "schema list", "doctor", "--help"):
        run(tidemill, *line.split(), cwd=tmp_path)


def direct_requirements(*extras: str) -> list[str]:
    """Return the declared requirements as direct ones, whose lower bounds `lowest-direct` chooses."""
    found = list(PROJECT["dependencies"])
    for extra in extras:
        found += PROJECT["optional-dependencies"][extra]
    return found


@pytest.mark.extended
def test_each_extra_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    table = Cluster(tmp_path)
    table.append([(1, "a", 1), (2, "b", 1)])
    environment = tmp_path / "env"
    run(sys.executable, "-m", "venv", "--without-pip", str(environment), cwd=tmp_path)
    python, tidemill = str(environment / "bin" / "python"), str(environment / "bin" / "tidemill")

    def install(extra: str = "") -> None:
        target = f"tidemill{extra} @ file://{wheel}"
        locked = ["--constraint", str(ROOT / "requirements.lock")]
        run(UV, "pip", "install", "--quiet", "--no-cache", "--python", python, *locked, target, cwd=tmp_path)

    def refused(*command: str, extra: str) -> None:
        done = run(*command, cwd=tmp_path, code=2)
        assert f"pip install 'tidemill[{extra}]'" in done.stderr and "Traceback" not in done.stderr

    install()
    used = sum(path.stat().st_size for path in environment.rglob("*") if path.is_file() and not path.is_symlink())
    assert used < READER_BYTES, f"the reader takes {used >> 20} MiB"
    assert run(tidemill, "--version", cwd=tmp_path).stdout == f"tidemill {__version__}\n"
    (row,) = json.loads(run(tidemill, "table", "list", "--json", cwd=tmp_path).stdout)
    assert row["shard"] == "orders"
    read = "import tidemill; print(tidemill.connect().table('orders').to_arrow().sort_by('k').to_pylist())"
    assert run(python, "-c", read, cwd=tmp_path).stdout == "[{'k': 1, 'v': 'a'}, {'k': 2, 'v': 'b'}]\n"
    refused(tidemill, "sql", "SELECT count(*) FROM orders", extra="duckdb")
    refused(tidemill, "up", extra="node")
    refused(tidemill, "topic", "consume", "clicks", extra="node")
    polars = "import tidemill; tidemill.connect().table('orders').to_polars()"
    assert "pip install 'tidemill[polars]'" in run(python, "-c", polars, cwd=tmp_path, code=1).stderr

    install("[duckdb,polars]")
    counted = run(tidemill, "sql", "SELECT count(*) AS n FROM orders", "--json", cwd=tmp_path)
    assert json.loads(counted.stdout)["rows"] == [[2]]
    run(python, "-c", polars, cwd=tmp_path)

    install("[node]")
    checks = json.loads(run(tidemill, "doctor", "--json", cwd=tmp_path).stdout)
    for name in ("spark", "java"):
        assert {"check": name, "ok": True}.items() <= next(c for c in checks if c["check"] == name).items()
    (tmp_path / "tidemill.toml").write_text(f'[node]\ndata = "{tmp_path}/data"\n[pipeline.p]\nfile = "p.py"\n')
    failed = run(tidemill, "doctor", cwd=tmp_path, code=1).stdout
    assert "FAIL spark: pyspark is not installed." in failed and "pip install 'tidemill[spark]'" in failed
    driver = [python, "-m", "tidemill.spark.pipeline.driver", "--objects", "memory:", "--consensus", "memory:"]
    driver += ["--name", "p", "--pipeline", "p.py", "--scratch", "scratch"]
    spark = run(*driver, cwd=tmp_path, code=2).stderr
    assert "pyspark is not installed. Pipelines need it; captured tables and topics are served without it" in spark
