"""A page in Chromium follows a shape through nginx, over a node that is killed and a table that is truncated."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.faults.cluster import cluster, until
from support.faults.restarts import capture_of, kept, restarted
from support.ports import free_port

CLIENT = Path(__file__).parents[1] / "clients/node_modules/@electric-sql/client/dist/index.browser.mjs"

pytestmark = [pytest.mark.browser, pytest.mark.node, pytest.mark.postgres]

PAGE = """<!doctype html><script type="module">
import { ShapeStream } from "/client.mjs";
const rows = new Map();
window.told = { refetches: 0, rows: {}, stale: 0 };
const stream = new ShapeStream({
  url: location.origin + "/v1/shape", params: { table: "item" },
  warnOnHttp: false, backoffOptions: { initialDelay: 50, maxDelay: 500, multiplier: 2 },
});
stream.subscribe((messages) => {
  for (const { key, value, headers } of messages) {
    if (headers.control === "must-refetch") { rows.clear(); window.told.refetches += 1; }
    else if (headers.operation === "delete") rows.delete(key);
    else if (headers.operation) rows.set(key, { ...rows.get(key), ...value });
  }
  if (window.told.refetches && [...rows.values()].some((row) => row.note === "before")) window.told.stale += 1;
  window.told.rows = Object.fromEntries([...rows.values()].map((row) => [row.id, row.note]));
});
</script>"""

NGINX = """
daemon off; master_process off; pid {home}/pid; error_log {home}/error.log info;
events {{ worker_connections 64; }}
http {{
    access_log off; types {{ text/html html; text/javascript mjs; }}
    client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/f;
    uwsgi_temp_path {home}/u; scgi_temp_path {home}/s;
    proxy_cache_path {home}/cache keys_zone=shapes:1m;
    server {{
        listen 127.0.0.1:{port};
        root {home}/pages;
        location /v1/ {{
            proxy_pass http://{upstream};
            proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_cache shapes; proxy_cache_revalidate on; proxy_cache_lock on;
            proxy_cache_background_update on; proxy_cache_use_stale updating;
        }}
    }}
}}
"""


@contextmanager
def nginx(home: Path, upstream: str) -> Iterator[str]:
    """Serve the page and cache the node's answers; yield the address."""
    binary = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if binary is None or not CLIENT.is_file():
        pytest.skip("needs nginx, and the packages of tests/clients: tests/clients/install")
    (home / "pages").mkdir(parents=True)
    (home / "pages/index.html").write_text(PAGE)
    (home / "pages/client.mjs").write_bytes(CLIENT.read_bytes())
    home.chmod(0o755)
    port, config = free_port(), home / "nginx.conf"
    user = "user root;\n"  # only this user may read the folder of the pages
    config.write_text(user + NGINX.format(home=home, port=port, upstream=upstream))
    process = subprocess.Popen([binary, "-p", str(home), "-c", str(config)])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_a_page_goes_on_where_it_was_after_a_restart_and_starts_over_without_a_stale_row_after_a_truncate(
    tmp_path: Path, postgres_dsn: str
) -> None:
    chromium = next((p for p in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if Path(p).exists()), None)
    if chromium is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    name = capture_of(postgres_dsn)
    toml = f'[capture.{name}]\ndsn = "{postgres_dsn}"\ntables = ["public.item"]\n[shapes]\nlong_poll_s = 2\n'
    with (
        psycopg.connect(postgres_dsn, autocommit=True) as connection,
        cluster(tmp_path / "node", toml) as made,
        nginx(tmp_path / "nginx", made.http) as address,
        sync_playwright() as playwright,
    ):
        connection.execute("CREATE TABLE item (id int PRIMARY KEY, note text)")
        connection.execute("INSERT INTO item SELECT n, 'before' FROM generate_series(1, 50) n")
        made.ready()
        until(lambda: made.get("/v1/shape?table=item&offset=-1")[0] == 200, lambda: (made.marks(), made.said))
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
        )
        page = browser.new_page()
        begun: list[str] = []
        page.on("request", lambda request: begun.append(request.url) if "offset=-1" in request.url else None)
        page.goto(f"{address}/index.html")

        def reported() -> dict[str, Any]:
            return dict(page.evaluate("() => window.told ?? {rows: {}}"))

        def shows(rows: dict[str, str]) -> None:
            until(lambda: reported()["rows"] == rows, lambda: (reported(), made.said))

        rows = {str(n): "before" for n in range(1, 51)}
        shows(rows)
        until(lambda: kept(made, name) == 1)
        pid = made.children()["node"]
        made.signal("node", signal.SIGKILL)
        connection.execute("DELETE FROM item WHERE id > 40")
        connection.execute("UPDATE item SET note = 'meanwhile' WHERE id = 1")
        until(lambda: restarted(made, pid), lambda: made.said)
        connection.execute("INSERT INTO item VALUES (99, 'later')")
        shows({str(n): "before" for n in range(2, 41)} | {"1": "meanwhile", "99": "later"})
        assert (reported()["refetches"], len(begun)) == (0, 1), begun
        connection.execute("BEGIN; TRUNCATE item; INSERT INTO item VALUES (1, 'new'); COMMIT")
        shows({"1": "new"})
        assert (reported()["refetches"], reported()["stale"]) == (1, 0)
        browser.close()
