"""Golden: references of Hugging Face transformers, and engine sets against them.

References need torch, the check must not load it.
"""
