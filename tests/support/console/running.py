"""A running cluster for the page, without Spark: one node, a captured table, a table of a program, a table that is only
declared, and a topic without records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from support.cli import cluster as stores
from support.faults.cluster import Cluster, cluster, until
from support.faults.restarts import capture_of
from tidemill.metastore.catalogue import PipelineRow


@contextmanager
def shop_cluster(directory: Path, dsn: str) -> Iterator[Cluster]:
    name = capture_of(dsn)
    toml = f'[capture.{name}]\ndsn = "{dsn}"\ntables = ["public.item"]\n[lake]\nenabled = true\n'
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE item (id int PRIMARY KEY, note text)")
        connection.execute("INSERT INTO item SELECT n, 'before' FROM generate_series(1, 50) n")
    with cluster(directory / "node", toml) as made:
        made.ready()
        within = stores.Cluster.of(made.config)
        within.append([(1, "a", 1), (2, "b", 1)], name="stock")
        within.pipeline(PipelineRow("shop", {"orders": "topic:orders"}, "shop.dead_letters"))
        within.topic("returns", 2)
        until(lambda: made.state(f"capture:{name}") in ("moving", "idle"), lambda: (made.marks(), made.said))
        yield made
