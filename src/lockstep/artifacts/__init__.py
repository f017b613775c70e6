"""The documents that stages leave: their formats, how they are read and written, their digests."""
