"""A new backend is one folder, which config, rules and builds know then; test_two_devices.py checks and locks two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkout import Checkout

BACKEND = Path(__file__).resolve().parents[1] / "data" / "dummy_backend"


def with_dummy(config: dict[str, Any]) -> None:
    config["models"]["demo-llama"] |= {"backends": ["dummy"], "precisions": ["fp32"], "layers": [2]}
    for prompt in config["models"]["demo-llama"]["golden"]["prompts"]:
        prompt["expected"].pop("all")
    config["backends"] = {"dummy": {"checked": False}}


@pytest.fixture
def dummy(demo: Checkout) -> Checkout:
    """The demo in a checkout with one more backend, and that one in its config."""
    package = demo.folder / "src/lockstep"
    shutil.copytree(BACKEND, package / "backends/dummy")
    # Its section, with all defaults, and the summary's code; no job of another backend.
    assert not {*demo.would_run()} - {"config", "summary"}
    demo.edit_config(with_dummy)
    jobs = demo.would_run()
    assert (jobs["build"], jobs["compare"], jobs["golden"]) == (1, 1, 1)
    assert not {"convert", "export", "validate", "reference"} & set(jobs)
    return demo


@pytest.mark.long
def test_a_dummy_backend_is_one_folder(dummy: Checkout) -> None:
    engines = dummy.results / "demo-llama/fp32/engines/dummy/engines.json"
    dummy.finish(str(engines.relative_to(dummy.folder)))
    assert json.loads(engines.read_text())["options"]["checked"] is False
    dummy.append("src/lockstep/backends/dummy/backend.py", "EDITED = 1\n")
    assert {"build", "compare", "golden"} <= set(dummy.would_run())


@pytest.mark.long
def test_a_mistake_in_its_section_is_one_line(fresh: Checkout) -> None:
    shutil.copytree(BACKEND, fresh.folder / "src/lockstep/backends/dummy")
    fresh.edit_config(lambda config: config.update(backends={"dummy": {"cheked": True}}))
    process = fresh.snakemake("--dry-run", check=False)
    lines = [line for line in (process.stdout + process.stderr).splitlines() if "dummy" in line]
    assert process.returncode == 2 and len(lines) == 1, lines
    expected = "backends.dummy.cheked: unknown key, did you mean checked? allowed: checked"
    assert lines[0].endswith(expected), lines

    backends = {"backends": ["dummy"], "precisions": ["fp32", "fp16"]}
    fresh.edit_config(lambda config: config.pop("backends") and config["models"]["demo-llama"].update(backends))
    process = fresh.snakemake("--dry-run", check=False)
    text = "precisions[1]: expected one of fp32 for backend dummy (it is here to be small); found 'fp16'"
    assert process.returncode == 2 and text in process.stdout + process.stderr
