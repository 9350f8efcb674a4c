"""`python -m tidemill`: the same as the `tidemill` command."""

from tidemill.cli.main import run

run()
