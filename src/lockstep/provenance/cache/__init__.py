"""The cache of artefacts, by build key, shared between checkouts and machines.

An artefact that was made once under a build key is copied, not built. A cache is a folder: `entries/<build key>.json`
lists the files of an artefact, `blobs/<sha256>` holds their bytes. Several machines may write to it at once, and
nothing in it is trusted without its digest.
"""
