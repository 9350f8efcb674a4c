"""Configs of topics: keys, values, changes (KIP-339), and the settings of this package."""
