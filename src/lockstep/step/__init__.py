"""One step of a model, from requests to logits or tokens.

Requests in; a packed batch; calls of engines; logits or tokens out.
"""
