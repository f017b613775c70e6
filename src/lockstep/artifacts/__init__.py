"""The documents that stages leave: formats, reading and writing, digests."""
