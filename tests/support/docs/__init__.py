"""Helpers of the tests that run what the pages show."""
