"""A real nginx as the cache of a node: HIT, STALE, REVALIDATED and MISS for each kind of answer."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port
from support.shapes.world import Answer, ShapeWorld, _fetch
from support.waiting import until
from tidemill.shapes import ShapeSettings
from tidemill.shapes.log.log import LogLimits
from tidemill.shapes.log.log_offset import BASE_END
from tidemill.shapes.settings import CacheAges

pytestmark = pytest.mark.postgres

DDL = "CREATE TABLE item (id int PRIMARY KEY, name text); INSERT INTO item SELECT n, 'n' FROM generate_series(1, 9) n;"

CONFIG = """
daemon off; master_process off; pid {home}/pid; error_log {home}/error.log info;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/f;
    uwsgi_temp_path {home}/u; scgi_temp_path {home}/s;
    proxy_cache_path {home}/cache keys_zone=shapes:1m;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://127.0.0.1:{upstream};
            proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_cache shapes; proxy_cache_revalidate on; proxy_cache_lock on;
            proxy_cache_background_update on; proxy_cache_use_stale updating;
            add_header x-cache $upstream_cache_status always;
        }}
    }}
}}
"""


class Cache:
    """Requests through nginx; `x-cache` of an answer is nginx's cache status."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def get(self, etag: str = "", **params: str) -> Answer:
        from urllib.parse import urlencode

        url = f"http://127.0.0.1:{self.port}/v1/shape?{urlencode(params)}"
        return await asyncio.to_thread(_fetch, url, {"if-none-match": etag} if etag else {}, "GET", None)

    async def said(self, **params: str) -> str:
        return str((await self.get(**params)).headers["x-cache"])


@asynccontextmanager
async def nginx(home: Path, upstream: int) -> AsyncIterator[Cache]:
    binary = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if binary is None:
        pytest.skip("needs nginx")
    port = free_port()
    config = home / "nginx.conf"
    config.write_text(CONFIG.format(home=home, port=port, upstream=upstream))
    process = await asyncio.create_subprocess_exec(binary, "-p", str(home), "-c", str(config))
    try:
        await until(lambda: answers(port))
        yield Cache(port)
    finally:
        process.terminate()
        await process.wait()


async def answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def test_nginx_serves_initial_rows_and_chunks_and_says_hit_stale_and_revalidated(
    postgres_dsn: str, tmp_path: Path
) -> None:
    settings = ShapeSettings(long_poll_s=1, cache=CacheAges(initial_s=30, later_s=2, live_s=1))
    async with ShapeWorld(postgres_dsn, DDL, settings) as world, nginx(tmp_path, world.server.port) as cache:
        first = await cache.get(table="item", offset="-1")
        assert (first.status, first.headers["x-cache"]) == (200, "MISS")
        again = await cache.get(table="item", offset="-1")
        assert (again.headers["x-cache"], again.body, again.handle) == ("HIT", first.body, first.handle)
        assert again.headers["x-request-id"] == first.headers["x-request-id"]
        known = await cache.get(first.headers["etag"], table="item", offset="-1")
        assert known.status == 304
        later = {"table": "item", "offset": first.offset, "handle": first.handle}
        assert [await cache.said(**later), await cache.said(**later)] == ["MISS", "HIT"]
        await until(lambda: is_said(cache, later, "STALE"))
        await until(lambda: is_said(cache, later, "HIT"))
        await world.db.execute("DELETE FROM item WHERE id = 1")
        await until(lambda: world.service.shapes()[0]["offset"] != str(BASE_END))
        await until(lambda: shows_the_delete(cache, later))
        assert await cache.said(table="item", offset="now") == "MISS"
        assert await cache.said(table="item", offset="now") == "MISS", "no-cache is never kept"
        subset = {"table": "item", "offset": "now", "subset__where": "id = 2"}
        assert [await cache.said(**subset), await cache.said(**subset)] == ["MISS", "MISS"]
        wrong = {"table": "nope", "offset": "-1"}
        assert [await cache.said(**wrong), await cache.said(**wrong)] == ["MISS", "MISS"]


async def test_nginx_asks_again_for_what_is_too_old_to_be_shown_and_keeps_it_when_it_is_the_same(
    postgres_dsn: str, tmp_path: Path
) -> None:
    """The proxy does not use stale-while-revalidate, like many CDNs: an age of 0 permits no stale answer."""
    ages = CacheAges(initial_s=1, later_s=1, live_s=1)
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=1, cache=ages)) as world:
        plain = CONFIG.replace("proxy_cache_background_update on; proxy_cache_use_stale updating;", "")
        plain = plain.replace(
            "proxy_cache shapes;",
            "proxy_cache shapes; proxy_ignore_headers Cache-Control; proxy_cache_valid 200 1s;",
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "CONFIG", plain)
            async with nginx(tmp_path, world.server.port) as cache:
                first = await cache.get(table="item", offset="-1")
                await until(lambda: is_said(cache, {"table": "item", "offset": "-1"}, "REVALIDATED"))
                assert (await cache.get(table="item", offset="-1")).body == first.body
                tail = {"table": "item", "offset": first.offset, "handle": first.handle}
                await cache.get(**tail)
                await until(lambda: is_said(cache, tail, "REVALIDATED"))


async def test_clients_that_poll_together_are_one_request_to_the_node(postgres_dsn: str, tmp_path: Path) -> None:
    async with (
        ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=3)) as world,
        nginx(tmp_path, world.server.port) as cache,
    ):
        first = await cache.get(table="item", offset="-1")
        tail = {"table": "item", "offset": first.offset, "handle": first.handle, "live": "true", "cursor": "7"}
        polls = [asyncio.ensure_future(cache.get(**tail)) for _ in range(5)]
        await until(lambda: any(shape["waiting"] for shape in world.service.shapes()))
        assert [shape["waiting"] for shape in world.service.shapes()] == [1]
        await world.db.execute("DELETE FROM item WHERE id = 1")
        found = await asyncio.gather(*polls)
        assert sorted(answer.headers["x-cache"] for answer in found) == ["HIT"] * 4 + ["MISS"]
        assert {answer.headers["electric-cursor"] for answer in found} != {"7"}
        assert len({answer.body for answer in found}) == 1


async def is_said(cache: Cache, params: dict[str, str], word: str) -> bool:
    return await cache.said(**params) == word


async def shows_the_delete(cache: Cache, params: dict[str, Any]) -> bool:
    return [item["headers"]["operation"] for item in (await cache.get(**params)).items] == ["delete"]


async def test_a_chunk_that_ended_where_the_log_did_is_another_answer_once_more_came(postgres_dsn: str) -> None:
    """The items are the same, but the answer no longer claims to be up to date."""
    settings = ShapeSettings(long_poll_s=1, limits=LogLimits(chunk_bytes=1))
    async with ShapeWorld(postgres_dsn, DDL, settings) as world:
        client = await world.sync(table="item")
        asked = {"table": "item", "offset": client.offset, "handle": client.handle}
        await world.db.execute("DELETE FROM item WHERE id = 1")
        await client.follow_until(lambda: len(client.rows) == 8)
        ended = await world.get(**asked)
        assert (len(ended.items), ended.controls) == (1, ["up-to-date"])
        same = await world.request("/v1/shape", asked, {"if-none-match": ended.headers["etag"]})
        assert same.status == 304
        await world.db.execute("DELETE FROM item WHERE id = 2")
        await client.follow_until(lambda: len(client.rows) == 7)
        grown = await world.request("/v1/shape", asked, {"if-none-match": ended.headers["etag"]})
        assert (grown.status, grown.items, grown.controls) == (200, ended.items, [])
