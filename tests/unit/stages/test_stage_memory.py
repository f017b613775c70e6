"""The peak memory of stages that hold a whole model, as a multiple of its weights: what docs/clusters.md says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from built_family import NAME, build_family

from shared import Shared

SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_local_experts": 16, "num_hidden_layers": 4, "head_dim": 64,
    "num_attention_heads": 8,
}  # fmt: skip
PAGE = Path(__file__).parents[3] / "docs/clusters.md"
SLACK = 0.15  # of the weights: a step's arrays, and what allocators keep
PEAK = """
import sys
from pathlib import Path
import onnxruntime, torch, transformers
from lockstep.targets import Limits, Results, Target
from lockstep.tolerances import Tolerances
from lockstep.verify.golden.check import check_engines
from lockstep.verify.golden.reference import make_reference
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.verify.validate import run as validate

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

stage, root, name = sys.argv[1:]
results = Results(Path(root))
files = results.assembly(name, "fp32"), results.weights(name, "fp32")
out = Path(root, f"{stage}.json")
reference = Path(root, "reference.json")
tolerances = Tolerances("fp32", "onnxruntime")
before = memory("VmRSS")
if stage == "reference":
    make_reference(results.checkpoint(name), "all", GoldenTerms(4, ("ab c", "de"), 24), out)
elif stage == "validate":
    validate(*files, results.checkpoint(name), "all", tolerances, 64, out, threads=1)
else:
    engines = results.engines(name, "fp32", "onnxruntime")
    target = Target(name, "fp32", "all", "onnxruntime")
    check_engines(*files, engines, reference, target, tolerances, Limits(2, 32, 64, 64), out, Path(root, "speed.json"))
size = sum(path.stat().st_size for path in Path(root).parent.glob("checkpoint/*.safetensors"))
print((memory("VmHWM") - before) / size)
"""


@pytest.mark.long
def test_stages_take_what_the_docs_say(shared: Shared) -> None:
    root = shared.folder("memory", lambda root: build_family(root, "mixtral", "fp32", **SIZES))
    stages = {stage: float(factor) for stage, factor in re.findall(r"`(\w+)`(?: takes)? (\d\.\d)", PAGE.read_text())}
    assert set(stages) == {"golden", "validate", "reference"} and max(stages["golden"], stages["validate"]) <= 2
    multiples = {}
    for stage in sorted(stages, reverse=True):  # golden reads the reference
        command = [sys.executable, "-c", PEAK, stage, str(root / "results"), NAME]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        multiples[stage] = float(ended.stdout)
    assert all(multiples[stage] <= stages[stage] + SLACK for stage in stages), multiples
