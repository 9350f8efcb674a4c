"""Decides which web pages may read responses in a browser (CORS). Requests without Origin do not come from a page.

*                          every page
https://shop.example       pages of exactly this origin
http://localhost:*         pages of this scheme and host, on any port
"""

from __future__ import annotations

from collections.abc import Sequence


class AllowedOrigins:
    def __init__(self, allowed: Sequence[str]) -> None:
        self._all = "*" in allowed
        self._exact = frozenset(origin.rstrip("/").lower() for origin in allowed if not origin.endswith(":*"))
        self._any_port = frozenset(origin[:-2].lower() for origin in allowed if origin.endswith(":*"))

    def is_allowed(self, origin: str) -> bool:
        origin = origin.lower()
        if self._all or origin in self._exact or origin in self._any_port:
            return True
        host, separator, port = origin.rpartition(":")
        return bool(separator) and port.isascii() and port.isdigit() and host in self._any_port

    def headers(self, origin: str) -> dict[str, str]:
        """Return the CORS headers of a response to a request from `origin` ("" = none). Caches must store one response
        per origin."""
        if self._all:
            return {"access-control-allow-origin": "*"}
        found = {"vary": "Origin"}
        if origin and self.is_allowed(origin):
            found["access-control-allow-origin"] = origin
        return found
