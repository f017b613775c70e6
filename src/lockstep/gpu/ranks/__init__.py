"""The ranks of a model on the GPUs of one host: their calls, and sums over them."""
