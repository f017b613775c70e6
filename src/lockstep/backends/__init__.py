"""Engines: a backend's built graphs, without weights.

The config reads the settings of backends, which are in this package too: nothing is imported here.
"""
