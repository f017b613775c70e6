"""What only TensorRT 8.6 needs."""
