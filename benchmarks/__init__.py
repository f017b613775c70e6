"""Benchmarks: each writes JSON with the hardware and the versions it ran on. Comparisons run side by side in one
process, in turn."""
