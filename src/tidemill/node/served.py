"""Sections of the configuration as the settings of the rooms they are about. Apart, since reading the configuration
must not load those rooms."""

from __future__ import annotations

from tidemill.base.config import HttpSection, ShapesSection
from tidemill.node.http_limits import HttpLimits
from tidemill.shapes.log import LogLimits
from tidemill.shapes.settings import CacheAges, ShapeSettings
from tidemill.shapes.sink import BacklogLimits


def http_limits(section: HttpSection) -> HttpLimits:
    return HttpLimits(
        connections=section.connections,
        per_address=section.per_address,
        address_connections=section.address_connections,
        header_timeout_s=section.header_timeout_s,
        header_bytes=section.header_kb << 10,
        body_bytes=section.body_kb << 10,
    )


def shape_settings(section: ShapesSection) -> ShapeSettings:
    return ShapeSettings(
        max_shapes=section.max_shapes,
        memory_bytes=section.memory_mb << 20,
        idle_s=section.idle_s,
        long_poll_s=section.long_poll_s,
        sse_s=section.sse_s,
        load_timeout_s=section.load_timeout_s,
        max_initial=section.max_initial,
        max_existing=section.max_existing,
        secret=section.secret,
        allow_delete=section.allow_delete,
        allowed_origins=tuple(section.allowed_origins),
        loop_share=section.loop_share,
        limits=LogLimits(section.chunk_kb << 10, section.log_mb << 20, section.base_mb << 20),
        backlog=BacklogLimits(section.backlog_mb << 20, section.backlog_s),
        cache=CacheAges(section.cache_initial_s, section.cache_later_s, section.cache_live_s),
    )
