"""The cache of artefacts, by build key, shared between checkouts and machines.

What was made once under a build key is taken, not made again. A cache is a folder: `entries/<build key>.json` lists the
files of an artefact, `blobs/<sha256>` holds their bytes. It may lie on a disk that several machines write to at once,
and nothing in it is believed without its digest.
"""
