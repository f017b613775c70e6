"""The files that manifests name: their digests, those that are lost, and whose they are."""
