"""Scripts of `cpu-peers`: each a contestant in a process, run by the interpreter that has its packages."""
