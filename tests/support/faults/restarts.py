"""A node that is killed and started again while clients follow its shapes."""

from __future__ import annotations

from support.faults.cluster import Cluster


def restarted(made: Cluster, pid: int) -> bool:
    return made.children().get("node", pid) != pid and made.get("/v1/health") == (200, '{"status":"active"}')


def capture_of(dsn: str) -> str:
    """A slot's name is one of the whole server, which tests share."""
    return dsn.rpartition("/")[2]


def kept(made: Cluster, capture: str) -> int:
    """Shapes that a restart would find."""
    import sqlite3

    with sqlite3.connect(f"file:{made.data}/shapes/n1/{capture}.db?mode=ro", uri=True) as file:
        return int(file.execute("SELECT count(*) FROM shapes").fetchone()[0])
