"""http: Electric's protocol over a ShapeService. Owns parameters, headers, caching rules, long polls, event streams.

`shape_routes(service)` returns starlette routes for GET/POST/OPTIONS/DELETE /v1/shape, GET /v1/health and the list GET
/api/shapes; node mounts them. Does not own shapes, nor the server of the routes.
"""

from __future__ import annotations

from tidemill.shapes.http.routes import shape_routes

__all__ = ["shape_routes"]
