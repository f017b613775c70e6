"""The server: requests over HTTP in, tokens out as they are made.

An API process, which keeps all state that matters, and an engine process, which may be restarted.
"""
