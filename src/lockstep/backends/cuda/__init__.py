"""The CUDA backend: graphs in, kernels and products out, without TensorRT.

A block is kernels in CUDA C++, generated from its graph, and products by cuBLAS or a kernel of ours. Its engine file is
text, built anywhere to the same bytes; NVRTC compiles it where it is loaded.
"""
