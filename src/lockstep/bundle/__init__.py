"""Bundles: an engine set in one file, the same bytes each time. `pack` writes one; `opened` opens it."""
