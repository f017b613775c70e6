"""OpenVINO on CPUs. Only `library` imports the package."""
