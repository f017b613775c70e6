"""Publishing: signatures of bundles, registries, the SBOM of a target, statements of rebuilds."""
