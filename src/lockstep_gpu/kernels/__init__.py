"""CUDA kernels of our own, each source with its launcher, and products by cuBLAS."""
