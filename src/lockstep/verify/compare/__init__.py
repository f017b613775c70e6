"""Compare: each engine of a set against the graph that it was built from."""

from lockstep.verify.compare.run import run

__all__ = ["run"]
