"""Compare: does each engine of a set compute what the graph computes that it was built from?"""

from lockstep.verify.compare.run import run

__all__ = ["run"]
