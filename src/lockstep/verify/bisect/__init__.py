"""Find the faulty part of a failing target: graph or engine, and block.

Engine against graph against PyTorch along a token sequence, stage by stage; Polygraphy can then find the node.

`explain.explain_failure` needs what runs engines and no more; `run.bisect` also needs torch and transformers.
"""
