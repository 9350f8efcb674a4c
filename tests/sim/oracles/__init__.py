"""Oracles: what must hold, checked on histories and final states. Each has a planted fault that makes it fire."""
