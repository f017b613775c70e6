"""Where the demo checkpoint lies, and what the config expects of it."""

from pathlib import Path

import yaml

from lockstep.config import load

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "resources" / "demo-llama"
CONFIG = load.load(yaml.safe_load((ROOT / "config" / "config.yaml").read_text()))
GOLDEN = CONFIG.models["demo-llama"].golden
LIMITS = CONFIG.limits.plain()
TOLERANCES = {precision: CONFIG.tolerance("demo-llama", precision, "onnxruntime") for precision in ("fp32", "fp16")}
