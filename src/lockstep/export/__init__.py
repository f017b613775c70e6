"""The split export of a model.

In: a checkpoint's config.json. Out: weight-free graphs and the recipe that assembles them.
"""

import gc

from lockstep.export import collector

with collector.paused():
    from lockstep.export.run import export

    gc.freeze()  # loaded modules stay: later collections, and the one at exit, need not walk them

__all__ = ["export"]
