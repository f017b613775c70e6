"""`serving-gpu`: the server on one GPU, with the engines and weights that `batches` has made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import batches, cold, options
from benchmarks.measure import recorder
from benchmarks.serving import Place, run

OPTIONS = (
    options.path(
        "--work", "The scratch folder of `batches`, with its engines and weights.", required=True, exists=True
    ),
    options.BACKEND,
    options.number("--kv-bytes", None, "Memory for the KV cache, where others need some too."),
    options.option(
        "--beside", "A server that gets the same requests, such as vLLM's.", many=True, metavar="NAME=URL"
    ),
    options.option("--rate", "Requests/s.", ("8", "24", "inf"), name="rates", many=True),
    options.number("--requests", 200), options.rounds(),
)  # fmt: skip


def main(
    work: Path, backend: str, kv_bytes: int | None, beside: Sequence[str], rates: Sequence[str],
    requests: int, rounds: int,
) -> None:  # fmt: skip
    """Compare the server with the bare engine on one GPU, also under Poisson arrivals, and when a long prompt comes."""
    other_servers = dict(server.partition("=")[::2] for server in beside)
    engines, assembly, weights = (
        str(work / name) for name in (f"{backend}/engines.json", "graphs/assembly.json", "weights/weights.json")
    )
    place = Place(engines, assembly, weights, batches.LIMITS, None, kv_bytes)
    about = cold.ask("benchmarks.gpu:described", engines=engines)
    note = recorder(out := work / "serving.json", {"benchmark": "serving-gpu", **about})
    note(**run(place, (16, 64), rates, requests, rounds, True, other_servers, note=note))
    print(out)
