"""http: Confluent's REST interface over a Registry. Owns paths, bodies, parameters and error bodies."""

from __future__ import annotations

from tidemill.registry.http.routes import registry_routes

__all__ = ["registry_routes"]
