"""The TensorRT backend: engines without weights, built and run on an NVIDIA GPU, with TensorRT 8.6, 10.x and 11.x."""
