"""One step of a model: requests are packed into a batch, engines run, and logits or tokens come out."""
