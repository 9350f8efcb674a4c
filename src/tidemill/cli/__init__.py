"""cli: the `tidemill` command, one file per subcommand, and the Harbour Shop demo.

Owns arguments, printing and exit codes. Owns no rule of another room: a command opens the stores of
the configuration and calls the rooms' public fronts. Rooms are imported only by the command that
needs them, so `tidemill --help` stays fast.
"""
