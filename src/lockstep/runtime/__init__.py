"""The runtime: an engine set and a weights manifest in, logits, tokens and text out. NumPy and the backend only."""

from lockstep.runtime.decoding import Decoding, Request, Speed, Token
from lockstep.runtime.generate import Generation, Piece, generate
from lockstep.runtime.model import Model
from lockstep.runtime.sampling import Sampler, Sampling
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.advance import Advance

__all__ = [
    "Advance",
    "Decoding",
    "Generation",
    "Model",
    "Piece",
    "Request",
    "Sampler",
    "Sampling",
    "Speed",
    "Token",
    "Tokenizer",
    "generate",
]
