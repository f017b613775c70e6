"""Lockstep: from a Hugging Face checkpoint to inference engines that are checked and can be built again."""

import os

__version__ = "0.1.0"

# What other packages would send of their own accord, off: before they are imported, and in every process started from
# this one. A value that the user has set stands. docs/network.md lists what each package does.
NO_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
for _name, _value in NO_TELEMETRY.items():
    if not os.environ.get(_name):
        os.environ[_name] = _value
