"""The server: an API process, which keeps all state that matters, and an engine process, which may restart."""
