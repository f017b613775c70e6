"""Models on the Hugging Face hub.

From `hf:org/name@revision` to a checkpoint folder at one commit. No torch, no transformers.
"""

from lockstep.checkpoint.hub.fetch import fetch

__all__ = ["fetch"]
