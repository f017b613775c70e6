"""Validate: are the exported graphs well-formed, and do they compute what the model computes in torch?"""

from lockstep.verify.validate.run import run

__all__ = ["run"]
