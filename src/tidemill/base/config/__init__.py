"""The configuration, `tidemill.toml`: one class per section, validated as a whole.

    file, environment, command line ──► config.Config ──► settings of each room

Owns keys, types, defaults and their limits. Does not own what a setting means: each room documents its own.
"""
