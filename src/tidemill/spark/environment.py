"""Names of a driver's environment variables. Every user of the machine can read a command line, but not an
environment."""

from __future__ import annotations

OBJECTS_VARIABLE = "TIDEMILL_OBJECTS__URL"
CONSENSUS_VARIABLE = "TIDEMILL_CONSENSUS__URL"
"""Names that the configuration itself reads."""

CONF_VARIABLE = "TIDEMILL_DRIVER_CONF"
"""Spark settings of a driver as a JSON object. They are not on the command line because some are secrets."""
