"""The runtime: an engine set and a weights manifest in, logits, tokens and text out. NumPy and the backend only."""

from lockstep.runtime.model import Model
from lockstep.runtime.step import Advance

__all__ = ["Advance", "Model"]
