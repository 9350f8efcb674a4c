"""The configuration, `tidemill.toml`: one class per section, validated as a whole.

    file, environment, command line ──► config.Config ──► settings of each package

Owns keys, types, defaults and their limits. Does not own the meaning of a setting: each package documents its own.
"""
