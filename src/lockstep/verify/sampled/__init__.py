"""A second sampler, in plain NumPy: the tokens that a request may have, their log-probabilities and text.

`served` compares the server with it. It shares no code with `step.sampling` and its device versions: both implement
docs/scheduling.md, "Sampling".
"""
