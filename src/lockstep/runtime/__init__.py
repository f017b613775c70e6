"""The runtime, which generates with an engine set.

An engine set and a weights manifest in; logits, tokens and text out. NumPy and the backend only.
"""

from lockstep.runtime.completion import Choice, Completion
from lockstep.runtime.draft_model import ModelDrafter
from lockstep.runtime.drafts import NgramDrafter, Speculation
from lockstep.runtime.engine import Engine
from lockstep.runtime.generate import Decoding, Generation, TextDelta, generate
from lockstep.runtime.model import Model, ModelOptions
from lockstep.runtime.request import CheckpointFiles, Request, Speed, Token
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.step.advance import Advance
from lockstep.step.logits_pipeline import Sampler
from lockstep.step.sampling import Sampling

__all__ = [
    "Advance",
    "CheckpointFiles",
    "Choice",
    "Completion",
    "Decoding",
    "Engine",
    "Generation",
    "Model",
    "ModelDrafter",
    "ModelOptions",
    "NgramDrafter",
    "Request",
    "Sampler",
    "Sampling",
    "Speculation",
    "Speed",
    "TextDelta",
    "Token",
    "Tokenizer",
    "generate",
]
