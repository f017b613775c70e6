"""A run certifies the endpoints of the config; `lockstep certify --checkpoint` runs what it needs."""

from __future__ import annotations

from typing import Any

import pytest
from checkout import Checkout

from lockstep.artifacts.certificate import AS_PUBLISHED, Certificate
from real_server import RealServer

OURS = "results/endpoints/ours.json"


@pytest.mark.long
def test_endpoints_are_certified(demo: Checkout) -> None:
    from lockstep.certify.tables import make_hypotheses  # loads torch

    with RealServer(demo.results) as server:

        def add_endpoints(config: dict[str, Any]) -> None:
            ours = {"url": f"{server.url}/v1", "model": "demo-llama", "served_name": "demo-llama", "requests": 120}
            config["endpoints"] = {"ours": ours, "misnamed": {**ours, "served_name": "demo"}}

        demo.edit_config(add_endpoints)
        assert demo.would_run() == {"hypotheses": 1, "certify": 2, "config": 1}
        model = demo.results / "demo-llama"
        (model / "hypotheses").mkdir()
        reference = model / "reference" / "all.json"
        make_hypotheses(model / "checkpoint.json", reference, model / "hypotheses" / "all.json", 40)  # of few questions
        process = demo.snakemake("--cores", "2", "--keep-going", OURS, "results/endpoints/misnamed.json", check=False)
        options = "--model", "demo-llama", "--checkpoint", "resources/demo-llama"
        judged = demo.run("lockstep", "certify", f"{server.url}/v1", *options)
    output = process.stdout + process.stderr
    assert Certificate.load(demo.folder / OURS).verdict == AS_PUBLISHED, output
    assert "demo-llama: as published" in (demo.results / "endpoints" / "ours.html").read_text()
    assert "/v1/completions: expected status 200, found 404" in output
    assert process.returncode == 1
    assert "demo-llama: as published" in judged.stdout
