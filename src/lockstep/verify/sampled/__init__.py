"""A second sampler, in plain NumPy: which tokens a request may have, and with which log-probabilities and text.

`served` holds the server to it. It shares no code with `step.sampling` and its copies on devices: what both follow is
docs/scheduling.md, "Sampling".
"""
