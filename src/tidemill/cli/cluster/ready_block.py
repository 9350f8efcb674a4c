"""The block that `tidemill up` prints when the first table is readable: the page, and how to read that table.

Pure: the statuses and facts of all processes decide. A table of a pipeline comes first; without pipelines, a captured
table over HTTP; without captures, the Kafka endpoint alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.base.address import Address
from tidemill.base.config.config import Config
from tidemill.base.status.freshness import SHARD
from tidemill.base.status.status import StageState, StatusReport, derive_statuses

DEAD_LETTERS = ".dead_letters"


def local_url(config: Config) -> str:
    """Return the URL of the node's HTTP server for a client on this machine."""
    return f"{'https' if config.http.tls else 'http'}://{Address.parse(config.node.http).reachable}"


def ready_block(config: Config, path: str, reports: Sequence[StatusReport], now_ms: int, waited_s: float) -> str:
    """Return the block, or "" as long as nothing is readable. `path` is the configuration's file, if one was named."""
    marks = derive_statuses(reports, now_ms)
    node = marks.get(f"node:{config.node.name}")
    if node is None or node.state is not StageState.IDLE:  # WAITING: a store is unavailable, or it failed
        return ""
    named = f" -c {path}" if path else ""
    base = local_url(config)
    token = ' -H "Authorization: Bearer $TOKEN"' if config.http.authenticate else ""
    lines = [("page", f"{base}/")]
    if config.pipeline:
        tables = sorted(name.removeprefix(SHARD) for name, one in marks.items() if _is_filled(name, one.mark.position))
        if not tables:
            return ""
        table, count = tables[0], len(tables)
        url = f"{base}/v1/shape?table=tidemill.{table}&offset=-1"
        connect = f'tidemill.connect("{path}")' if path else "tidemill.connect()"
        lines += [
            ("curl", f'curl{token} "{url}"'),
            ("Python", f'{connect}.table("{table}").to_arrow()'),
            ("PySpark", f'spark.read.format("tidemill").load("{table}").show()'),
            ("SQL", f"tidemill{named} sql 'SELECT count(*) FROM \"{table}\"'"),
        ]
        what = f"table {table} is readable" + (f", and {count - 1} more" if count > 1 else "")
    elif config.capture:
        first = _first_captured_table(config, reports)
        if not first:
            return ""
        lines += [
            ("curl", f'curl{token} "{base}/v1/shape?table={first}&offset=-1"'),
            ("shell", f"tidemill{named} shape get {first}"),
            ("Kafka", f"bootstrap.servers={Address.parse(config.node.kafka).reachable}"),
        ]
        what = f"table {first} is readable"
    else:
        lines.append(("Kafka", f"bootstrap.servers={Address.parse(config.node.kafka).reachable}"))
        what = "the node accepts clients"
    shown = "\n".join(f"  {name:8} {text}" for name, text in lines)
    return f"ready after {waited_s:.0f} s: {what}\n{shown}"


def _is_filled(name: str, position: int) -> bool:
    return name.startswith(SHARD) and position > 0 and not name.endswith(DEAD_LETTERS) and "@" not in name


def _first_captured_table(config: Config, reports: Sequence[StatusReport]) -> str:
    for report in reports:
        for name in config.capture:
            facts = report.facts.get(f"capture:{name}")
            if isinstance(facts, dict) and facts.get("snapshot_done") and facts.get("first_table"):
                return str(facts["first_table"])
    return ""
