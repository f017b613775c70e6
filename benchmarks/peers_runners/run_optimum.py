"""optimum's ONNX exporter, with past, as its command line does it.

Its own check against torch is left out, which makes it faster.
"""

from __future__ import annotations

from past_session import decode
from side import main


def export(job: dict) -> None:
    from optimum.exporters.onnx import main_export

    main_export(job["checkpoint"], job["out"], task="text-generation-with-past", framework="pt", do_validation=False)


if __name__ == "__main__":
    main(("onnx", "onnxruntime", "optimum", "optimum-onnx", "torch", "transformers"), export, decode)
