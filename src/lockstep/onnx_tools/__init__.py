"""ONNX graphs in, ONNX graphs out. Passes, sessions that compute graphs, text that shows them."""
