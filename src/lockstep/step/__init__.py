"""One step of a model: requests in, a packed batch, calls of engines, logits or tokens out."""
