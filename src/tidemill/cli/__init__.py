"""cli: the `tidemill` command, one module or package per command.

    main (command tree) ─► a command ─► context (configuration, open stores) ─► interfaces of the rooms ─► output

Owns arguments, output and exit codes. Owns no rule of another room. Each command imports the rooms that it needs, so
that `tidemill --help` starts quickly.
"""
