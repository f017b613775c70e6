"""Find where a failing target leaves the right path: graph or engine, and block.

Engine against graph against PyTorch along a token sequence, stage by stage; Polygraphy goes on to the node.

`explain.explain_failure` needs what runs engines and no more; `run.bisect` also needs torch and transformers.
"""
