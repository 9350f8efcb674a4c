"""One or more examples of each command, shown at the end of its help. A test parses each of them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

EXAMPLES: dict[str, tuple[str, ...]] = {
    "init": ("tidemill init shop --dsn postgresql://me@localhost:5432/shop",),
    "up": ("tidemill up", "tidemill up --config shop/tidemill.toml --instances 2"),
    "pipeline check": ("tidemill pipeline check shop.py", "tidemill pipeline check shop.py --cluster"),
    "pipeline run": ("tidemill pipeline run shop --instances 2 --master 'local[4]'",),
    "pipeline list": ("tidemill pipeline list",),
    "pipeline describe": ("tidemill pipeline describe shop",),
    "pipeline restart": ("tidemill pipeline restart shop",),
    "pipeline delete": ("tidemill pipeline delete shop",),
    "restore": ("tidemill restore --dry-run", "tidemill restore --from s3://backup/shop"),
    "status": ("tidemill status", "tidemill status --watch", "tidemill status --latency"),
    "why": ("tidemill why orders", "tidemill why"),
    "logs": ("tidemill logs node -f", "tidemill logs shop --lines 100"),
    "doctor": ("tidemill doctor", "tidemill doctor --deep --contents"),
    "version": ("tidemill version --json",),
    "table list": ("tidemill table list",),
    "table describe": ("tidemill table describe orders",),
    "table history": ("tidemill table history orders --last 10",),
    "table compact": ("tidemill table compact orders",),
    "table evolve": (
        "tidemill table evolve orders --add 'note string'",
        "tidemill table evolve orders --widen 'id bigint' --yes",
    ),
    "table export": ("tidemill table export orders ./orders-export --as-of 2026-11-22T12:00:00Z",),
    "table drop": ("tidemill table drop orders",),
    "sql": ("tidemill sql 'SELECT status, count(*) FROM orders GROUP BY status'",),
    "verify": ("tidemill verify orders", "tidemill verify"),
    "shape list": ("tidemill shape list",),
    "shape get": ("tidemill shape get public.orders --where \"status = 'open'\"",),
    "shape sign": ("tidemill shape sign public.orders --where 'customer = $1' --param 42 --expires-s 3600",),
    "capture list": ("tidemill capture list",),
    "capture resnapshot": ("tidemill capture resnapshot public.orders",),
    "capture accept": ("tidemill capture accept public.orders",),
    "capture drop": ("tidemill capture drop shop",),
    "topic create": ("tidemill topic create clicks --partitions 4 --set retention.ms=86400000",),
    "topic alter": ("tidemill topic alter clicks --partitions 8 --dry-run",),
    "topic list": ("tidemill topic list",),
    "topic describe": ("tidemill topic describe clicks",),
    "topic delete": ("tidemill topic delete clicks",),
    "topic lost": ("tidemill topic lost clicks",),
    "topic produce": ("tidemill topic produce clicks clicks.txt --key =",),
    "topic consume": ("tidemill topic consume clicks --from -10 --keys", "tidemill topic consume clicks --follow"),
    "lake list": ("tidemill lake list",),
    "lake describe": ("tidemill lake describe orders",),
    "lake publish": ("tidemill lake publish orders",),
    "schema list": ("tidemill schema list",),
    "schema show": ("tidemill schema show clicks-value --version 2",),
    "schema register": ("tidemill schema register clicks-value clicks.avsc",),
    "schema delete": ("tidemill schema delete clicks-value --version 1",),
    "schema check": ("tidemill schema check clicks-value clicks.avsc",),
    "dead-letters list": ("tidemill dead-letters list shop --limit 5",),
    "dead-letters replay": ("tidemill dead-letters replay shop --dry-run",),
    "group list": ("tidemill group list",),
    "group describe": ("tidemill group describe billing",),
    "group alter": ("tidemill group alter billing --set consumer.session.timeout.ms=45000",),
    "group reset": ("tidemill group reset billing --to earliest --topic clicks --dry-run",),
    "group delete": ("tidemill group delete billing",),
    "txn list": ("tidemill txn list --open",),
    "txn abort": ("tidemill txn abort billing-1",),
    "user add": ("tidemill user add alice",),
    "user list": ("tidemill user list",),
    "user delete": ("tidemill user delete alice",),
    "acl add": ("tidemill acl add User:alice read,describe topic:orders",),
    "acl list": ("tidemill acl list --principal User:alice",),
    "acl delete": ("tidemill acl delete User:alice read topic:orders",),
}


def add_examples(name: str, command: Any) -> None:
    """Show the examples of a command, and of those below it, in their help."""
    if isinstance(command, TyperGroup):
        for part, each in command.commands.items():
            add_examples(f"{name} {part}", each)
    elif name in EXAMPLES:
        title = "Example:" if len(EXAMPLES[name]) == 1 else "Examples:"
        command.epilog = "\n\n".join((title, *EXAMPLES[name]))
