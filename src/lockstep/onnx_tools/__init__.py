"""ONNX graphs in, ONNX graphs out: passes, sessions that compute them, text that shows them."""
