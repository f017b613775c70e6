"""Planted faults: which of them the checks catch."""
