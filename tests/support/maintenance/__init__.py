"""Helpers of the tests of maintenance."""
