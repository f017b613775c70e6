"""Scripts that `python -m benchmarks peers` runs in processes of their own.

One script a contestant, each with `export`, `decode`, or both.

They run by path, in environments where this package is not installed, so they import nothing of it (that of this
project apart).
"""
