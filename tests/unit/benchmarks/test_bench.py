"""Benchmarks: contestants agree on a tiny shape; missing packages are reported first."""

import numpy as np
import pytest
from benchmarks import gpu
from benchmarks.__main__ import bench
from click.testing import CliRunner

from lockstep.artifacts.files import write_json


@pytest.mark.parametrize("command", ["gpu", "batches"])
@pytest.mark.parametrize("backend", ["cuda", "tensorrt"])
def test_what_a_backend_lacks_here_is_one_line_before_anything_is_made(tmp_path, monkeypatch, capfd, command, backend):
    """The process that is asked about the device says it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # no GPU, on a machine with one too
    ended = CliRunner().invoke(bench, [command, "--work", str(tmp_path / "work"), "--backend", backend])
    (line,) = capfd.readouterr().err.splitlines()
    assert ended.exit_code == 2 and line.startswith(f"lockstep: error: backend {backend}: ")
    assert not (tmp_path / "work").exists()


def test_agreement_counts_the_tokens_that_differ_and_says_how_near_they_were():
    exact = np.array([[0.0, 1.0, 0.9], [2.0, 0.0, 0.0], [0.0, 0.0, 3.0]], np.float32)
    ours = exact + np.array([[0, -0.0625, 0.0625], [0, 0, 0], [0, 0, 0]], np.float32)
    actual = gpu.agreement(ours, exact, exact - np.float32(0.03125))
    assert actual["same_tokens"] == 2 and actual["same_tokens_of_transformers_fp16"] == 3 and actual["tokens"] == 3
    assert actual["preferred_by"] == pytest.approx(0.1) and actual["preferred_by"] <= 2 * actual["max_logit_error"]
    assert actual["passes"] and not gpu.agreement(ours, exact, exact - np.float32(0.03))["passes"], (
        "0.0625 is twice 0.03125"
    )


@pytest.mark.parametrize("whose", ["max_logit_error", "max_logit_error_of_transformers_fp16"])
def test_logits_that_are_not_finite_agree_with_nothing_and_can_be_recorded(tmp_path, whose):
    exact = np.array([[0.0, 1.0, 0.9]], np.float32)
    spoilt = np.array([[0.0, np.nan, 0.9]], np.float32)
    actual = gpu.agreement(*((spoilt, exact, exact) if whose == "max_logit_error" else (exact, exact, spoilt)))
    assert actual[whose] is None and not actual["passes"]
    write_json(tmp_path / "record.json", actual)


def test_a_shape_that_is_no_llama_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "gpt2.json").write_text('{"model_type": "gpt2"}')
    ended = CliRunner().invoke(bench, ["gpu", "--work", str(tmp_path / "work"), "--shape", str(tmp_path / "gpt2.json")])
    assert ended.exit_code == 2
    assert ended.stderr.splitlines() == [
        f"lockstep: error: {tmp_path}/gpt2.json: model_type: expected llama, the class that transformers runs for "
        f"comparison, found 'gpt2'; name another shape"
    ]
