"""Bundles: an engine set in one file, the same bytes each time (`pack`), that runs where only its backend is installed
(`opened`)."""
