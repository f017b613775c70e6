"""A model repository for NVIDIA's Triton Inference Server.

Its five models ask `lockstep serve --unix`.
"""
