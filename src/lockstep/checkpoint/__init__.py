"""Checkpoints: from a source in the config to a manifest.

The manifest lists the checkpoint's files and tensors. No torch, no transformers.
"""

from lockstep.checkpoint.resolve import describe, resolve, resolve_architecture, resolve_fetched

__all__ = ["describe", "resolve", "resolve_architecture", "resolve_fetched"]
