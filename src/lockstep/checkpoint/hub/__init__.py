"""Fetch models from the Hugging Face hub, to a checkpoint folder at one commit. No torch, no transformers."""

from lockstep.checkpoint.hub.fetch import fetch

__all__ = ["fetch"]
