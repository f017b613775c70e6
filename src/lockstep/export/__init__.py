"""The split export of a model.

In: a checkpoint's config.json. Out: weight-free graphs and the recipe that assembles them.
"""

import gc

from lockstep.processes import paused_collector

# A collection would walk half a million objects once torch and transformers are loaded.
with paused_collector():
    import transformers.modeling_utils  # noqa: F401

    gc.freeze()  # loaded modules stay: later collections, and the one at exit, need not walk them
