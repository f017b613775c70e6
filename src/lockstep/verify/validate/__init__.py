"""Validate: exported graphs against torch, and against ONNX's rules.

They must be well-formed, and compute what the model computes in torch.
"""

from lockstep.verify.validate.run import run

__all__ = ["run"]
