"""cli: the `tidemill` command, one module per command, in packages of related commands.

    main (command tree) ─► a command ─► context (configuration, open stores) ─► interfaces of the rooms ─► output

The room owns arguments, output and exit codes, and no rule of another room. Each command imports only the rooms that it
needs, so that `tidemill --help` starts quickly.
"""
