"""Tensor parallelism over the GPUs of one host: the ranks' calls, and all-reduces over them."""
