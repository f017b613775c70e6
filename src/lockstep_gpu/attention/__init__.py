"""Attention over a KV cache on a GPU: traced, or fused over a paged cache."""
