"""Choices inside a model, such as a router's experts, and the outputs that follow from near-ties."""
