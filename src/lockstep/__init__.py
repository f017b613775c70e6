"""Lockstep: from a Hugging Face checkpoint to inference engines that are checked and can be built again."""

__version__ = "0.1.0"
