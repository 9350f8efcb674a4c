"""Checks of `tidemill doctor --deep`: logs, rows and contents. Reads only."""
