"""Shapes that the server defines: table, clause and columns are fixed; values come from constants, claims or the
client. Pure.

- Invariant (values are parameters): a value is always a parameter of the clause, never part of its text.
- Invariant (missing claim denies): a claim that the token lacks, or that is no usable value, denies the request. NULL
  is never used in its place.
- Invariant (nothing else from clients): a client adds only protocol parameters, and the values that the definition
  requires. With `narrow` it may add a clause and columns, which apply within the definition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.shapes.definition.definition import LogMode, Replica
from tidemill.shapes.definition.permissions import AccessDeniedError
from tidemill.shapes.definition.planner import (
    MAX_PARAMS,
    ServerBounds,
    ShapeRequest,
    parse_shard_name,
    parse_table_name,
)
from tidemill.shapes.where import WhereError, param_numbers


class FromClaim(msgspec.Struct, frozen=True):
    name: str


class FromClient(msgspec.Struct, frozen=True):
    """The value that the client sends as `params[number]`."""

    number: int


Param = str | FromClaim | FromClient


class ServerDefinedShape(msgspec.Struct, frozen=True):
    """One definition. `columns` () = all; a subset, or a client's own clause, may use only these columns."""

    name: str
    table: str
    where: str = ""
    params: tuple[Param, ...] = ()
    columns: tuple[str, ...] = ()
    replica: Replica = "default"
    narrow: bool = False

    @property
    def client_param_count(self) -> int:
        """Number of values that the client must send."""
        return max((param.number for param in self.params if isinstance(param, FromClient)), default=0)

    def check_servable(self) -> None:
        """Raise InvalidError if the definition could never be served."""
        key = f"shape.{self.name}"
        try:
            if parse_shard_name(self.table) is None:
                parse_table_name(self.table)
            used = param_numbers(self.where) if self.where else set()
        except WhereError as error:
            raise InvalidError(
                f"bad value: {key}.where: {error.message.rstrip('.')}.", fix=f"Correct {key}.where."
            ) from error
        except InvalidError as error:
            raise InvalidError(
                f"bad value: {key}.table: {error.message.rstrip('.')}.", fix=f"Correct {key}.table."
            ) from error
        if len(self.params) > MAX_PARAMS or used != set(range(1, len(self.params) + 1)):
            raise InvalidError(
                f"{key}.where must use each of {key}.params at least once, as $1 to ${len(self.params)}:"
                f" used={sorted(used)} params={len(self.params)}.",
                fix="Make the parameters of the clause match the list of values.",
            )

    def bind_params(self, claims: Mapping[str, object] | None, given: Sequence[str]) -> tuple[str, ...]:
        """Return the values for the clause. Raises AccessDeniedError.

        `claims`: None if the client is not authenticated. `given`: the client's values, `client_param_count` of them.
        """
        return tuple(self._param_value(param, claims, given) for param in self.params)

    def _param_value(self, param: Param, claims: Mapping[str, object] | None, given: Sequence[str]) -> str:
        if isinstance(param, str):
            return param
        if isinstance(param, FromClient):
            return given[param.number - 1]
        if claims is None:
            raise AccessDeniedError(401, "this shape requires an access token.", fix="Send a token.")
        text = claim_text(claims.get(param.name))
        if text is None:
            raise AccessDeniedError(403, f"the token lacks a claim that this shape requires: claim={param.name}.")
        return text

    def fixed_request(self, values: tuple[str, ...], log_mode: LogMode) -> ShapeRequest:
        return ShapeRequest(self.table, self.where, values, self.columns, self.replica, log_mode, self.columns)

    def narrowed_request(self, values: tuple[str, ...], own: ShapeRequest) -> ShapeRequest:
        """Return the client's request within this definition. `own`: its parameters; its columns must pass
        `hidden_columns`."""
        within = ServerBounds(self.where, values, self.columns)
        queryable = own.queryable or self.columns
        return ShapeRequest(
            self.table, own.where, own.params, own.columns, self.replica, own.log_mode, queryable, within
        )

    def hidden_columns(self, columns: Iterable[str]) -> list[str]:
        """Return the columns among `columns` that a client may not name."""
        return [name for name in columns if self.columns and name not in self.columns]


def claim_text(value: object) -> str | None:
    """Return a claim as the text of a parameter; a list as an array, for `= ANY($1)`.

    None if it is no usable value, or contains characters that PostgreSQL's text cannot.
    """
    if isinstance(value, list):
        items = [claim_text(item) if not isinstance(item, list) else None for item in value]
        if any(item is None for item in items):
            return None
        quoted = ('"' + str(item).replace("\\", "\\\\").replace('"', '\\"') + '"' for item in items)
        return "{" + ",".join(quoted) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int | float):
        return str(value)
    return value if isinstance(value, str) and "\0" not in value else None
