"""Names of environment variables of a driver. A command line is readable by every user of the machine, an environment
is not."""

from __future__ import annotations

OBJECTS_VARIABLE = "TIDEMILL_OBJECTS__URL"
CONSENSUS_VARIABLE = "TIDEMILL_CONSENSUS__URL"
"""The names that the configuration itself reads."""

CONF_VARIABLE = "TIDEMILL_DRIVER_CONF"
"""Spark settings of a driver as a JSON object: some hold secrets."""
