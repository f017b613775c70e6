"""The TensorRT-RTX backend, for NVIDIA RTX GPUs; builds on any x86-64. Only `library` imports the package."""
