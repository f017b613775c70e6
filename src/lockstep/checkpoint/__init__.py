"""From a source in the config to the manifest of a checkpoint's files and tensors. No torch, no transformers."""

from lockstep.checkpoint.resolve import describe, resolve, resolve_architecture, resolve_fetched

__all__ = ["describe", "resolve", "resolve_architecture", "resolve_fetched"]
