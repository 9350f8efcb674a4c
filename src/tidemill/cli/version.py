"""`tidemill version`: the versions of the program and of what it stores, for a bug report."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

from tidemill import __version__
from tidemill.cli.output.output import TABLE, Output
from tidemill.cli.output.text_table import Column

LIBRARIES = ("pyspark", "pyarrow", "duckdb", "psycopg", "obstore")


def version(out: Output = TABLE) -> None:
    """Show the versions of tidemill, Python, Spark and the stored formats."""
    found: dict[str, str | None] = {
        "tidemill": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    found |= {name: _installed(name) for name in LIBRARIES}
    formats = stored_formats()
    rows: list[dict[str, object]] = [{"name": name, "version": number} for name, number in found.items()]
    rows += [{"name": f"format {name}", "version": number} for name, number in formats.items()]
    shown = Column("version", lambda row: row["version"] or _missing(str(row["name"])))
    out.rows(rows, [Column("name"), shown], value={**found, "formats": formats})


def stored_formats() -> dict[str, int]:
    """Return the version of each format on disk, in the bucket and in consensus that this program writes."""
    from tidemill.consensus.postgres import schema as postgres
    from tidemill.consensus.sqlite import schema as sqlite
    from tidemill.metastore import cluster, cluster_manifest
    from tidemill.metastore.lsm import manifest, sst
    from tidemill.shards.state import codec
    from tidemill.topics.l0.format import MAGIC as L0
    from tidemill.topics.l1.format import FOOTER_MAGIC as L1

    return {
        "cluster": cluster.FORMAT,
        "cluster-manifest": cluster_manifest.FORMAT,
        "lsm-manifest": manifest.FORMAT,
        "sst": sst.FORMAT,
        "l0": L0[-1],
        "l1": L1[-1],
        "table-rollup": codec.ROLLUP_FORMAT,
        "consensus-sqlite": sqlite.LAYOUT_VERSION,
        "consensus-postgres": postgres.LAYOUT_VERSION,
    }


def _installed(name: str) -> str | None:
    try:
        return version_of(name)
    except PackageNotFoundError:
        return None


def _missing(name: str) -> str:
    return "not installed" + (": pip install 'tidemill[spark]'" if name == "pyspark" else "")
