"""Choices inside a model: which experts a router takes, and what follows from a choice that rounding decides."""
