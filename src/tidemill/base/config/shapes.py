"""Sections of the configuration about shapes: limits, and server-defined shapes."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from tidemill.base.config.sections import Section
from tidemill.base.limits import LOOPBACK_ORIGINS


class ShapesSection(Section):
    """See `shapes.settings.ShapeSettings`, created by `node.settings_from_config`."""

    secret: str = ""
    allowed_origins: list[str] = list(LOOPBACK_ORIGINS)
    allow_delete: bool = False
    max_shapes: int = Field(1_000_000, ge=1, le=1_000_000)
    memory_mb: int = Field(512, ge=1)
    disk_mb: int = Field(4_096, ge=0)
    base_mb: int = Field(256, ge=1)
    log_mb: int = Field(64, ge=1)
    chunk_kb: int = Field(10_240, ge=1, le=102_400)
    idle_s: float = Field(300.0, ge=1.0)
    backlog_mb: int = Field(64, ge=1)
    backlog_s: float = Field(10.0, ge=0.5)
    loop_share: float = Field(0.5, ge=0.05, le=0.95)
    max_initial: int = Field(300, ge=1)
    max_existing: int = Field(10_000, ge=1)
    subset_mb: int = Field(16, ge=1)
    long_poll_s: float = Field(20.0, ge=1.0, le=600.0)
    sse_s: float = Field(60.0, ge=2.0, le=3600.0)
    load_timeout_s: float = Field(45.0, ge=1.0, le=600.0)
    cache_initial_s: int = Field(3_600, ge=0)
    cache_later_s: int = Field(60, ge=0)
    cache_live_s: int = Field(5, ge=0)
    cache_stale_s: int = Field(300, ge=0)

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            if origin != "*" and not re.fullmatch(r"https?://[^/*\s]+(:\*)?", origin):
                raise ValueError(f"{origin!r}: write http(s)://host[:port], http(s)://host:* or *")
        return value


class BoundParam(Section):
    """A bound value: the token's `claim`, or the client's own `params[client]`."""

    claim: str = ""
    client: int = Field(0, ge=0, le=1_000)


class ShapeSection(Section):
    """One server-defined shape; see `shapes.definition.server_defined.ServerDefinedShape`, created by
    `node.settings_from_config`.
    """

    table: str = Field(min_length=1)
    where: str = ""
    params: list[str | BoundParam] = []
    columns: list[str] = []
    replica: Literal["default", "full"] = "default"
    narrow: bool = False

    @property
    def claims(self) -> list[str]:
        """Names of the claims to which its clause is bound."""
        return [param.claim for param in self.params if isinstance(param, BoundParam) and param.claim]

    @field_validator("params", mode="before")
    @classmethod
    def _values(cls, value: Any) -> Any:
        return [_parse_param(each) for each in value] if isinstance(value, list) else value

    @field_validator("params")
    @classmethod
    def _check_client_numbers(cls, value: list[str | BoundParam]) -> list[str | BoundParam]:
        numbers = {each.client for each in value if isinstance(each, BoundParam) and each.client}
        if numbers != set(range(1, len(numbers) + 1)):
            raise ValueError("client parameters must be numbered from 1 without gaps: { client = 1 }, { client = 2 }")
        return value

    @field_validator("columns")
    @classmethod
    def _columns(cls, value: list[str]) -> list[str]:
        if not all(value):
            raise ValueError("a column has no name")
        return value

    @field_validator("narrow")
    @classmethod
    def _check_narrow(cls, value: bool, info: ValidationInfo) -> bool:
        params = info.data.get("params", [])
        if value and any(isinstance(each, BoundParam) and each.client for each in params):
            raise ValueError("with narrow, params belong to the client's own clause: omit { client = … }")
        return value


def _parse_param(value: Any) -> Any:
    """Return a value as text, or its binding."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    bound = isinstance(value, dict) and len(value) == 1 and (value.get("claim") or value.get("client"))
    if not isinstance(value, str) and not bound:
        raise ValueError('write a value, { claim = "NAME" } of the token, or { client = 1 } for what the client sends')
    if isinstance(value, str) and "\0" in value:
        raise ValueError("a value contains a zero byte, which PostgreSQL text cannot")
    return value
