"""The CUDA backend: kernels of our own and products by cuBLAS; engine files are text, built anywhere."""
