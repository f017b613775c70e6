"""The build stage: an assembly in, an engine set out; engines of an earlier build that still fit are kept."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from lockstep.artifacts import formats
from lockstep.artifacts.assembly import Assembly, GraphFile
from lockstep.artifacts.engines import EngineFile, EngineSetManifest
from lockstep.artifacts.files import disk_room, sha256_file, write_json
from lockstep.backends.base import Backend, Built, get_backend
from lockstep.backends.graphs import BaseGraph, RopeGraph, RowsGraph, graph_file
from lockstep.errors import InputError
from lockstep.manifests.own_files import replacing, stale_files
from lockstep.onnx_tools.adapted_graphs import WithoutAdapters
from lockstep.onnx_tools.cut_products import has_quantized_products
from lockstep.onnx_tools.prepare import prepare
from lockstep.onnx_tools.rope import rotary
from lockstep.onnx_tools.signature import signature_of
from lockstep.onnx_tools.toolkit import run_passes

COSTS = "build.costs.json"  # of the last build; a separate file, as seconds and memory differ in each build


def build(
    assembly_json: str | os.PathLike,
    backend: str,
    out_engines_json: str | os.PathLike,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Build the engine set of an assembly and write its engines.json.

    Returns its path. An engine already there is kept when graph, options, device, backend version and builder revision
    are those recorded and its file is whole. Raises InputError for a precision that the backend lacks, for a file of
    someone else where an engine goes and for a full disk, CheckError for a graph that is damaged or that the library
    refuses.
    """
    assembly_path = Path(assembly_json)
    out = Path(out_engines_json)
    assembly = Assembly.load(assembly_path)
    library = get_backend(backend)
    _check_supported(assembly_path, assembly, library, options or {})
    manifest = EngineSetManifest(
        backend=backend,
        backend_version=library.version(),
        builder_revision=library.revision,
        precision=assembly.precision,
        device=library.describe_device(),
        options={**library.default_options(), **(options or {})},
    )
    graphs = list(library.graphs(assembly, manifest.options))
    files = {library.file(name) for name, _ in graphs}
    stale_files(out, files)  # first: it refuses to overwrite files of someone else
    library.start(out.parent, manifest, [name for name, _ in graphs])
    with disk_room(f"{out.parent}: expected room for engines"), replacing(out, files) as stale:
        _remove_temporary(out.parent, files)
        engines, costs = _engines(assembly_path, graphs, out, manifest, library)
        manifest = replace(manifest, engines=engines, details=library.finish(list(engines)))
        replace(manifest, digest=manifest.digest_for(library.device_key(manifest.device))).save(out)
    if costs and library.takes_long:
        write_json(out.parent / COSTS, {"format": formats.BUILD_COSTS, "engines": costs})
    for path in stale:
        if path.suffix in library.suffixes:  # engines of an earlier assembly
            path.unlink()
    return out


def _check_supported(path: Path, assembly: Assembly, library: Backend, options: Mapping[str, Any]) -> None:
    """Raise InputError for options, a precision or settings of the model that the backend lacks."""
    unknown = sorted(set(options) - set(library.default_options()))
    if unknown:
        raise InputError(
            f"options of backend {library.name}: expected only {', '.join(library.default_options())}, found "
            f"{', '.join(unknown)}"
        )
    if assembly.precision not in library.precisions:
        raise InputError(
            f"{path}: precision: expected one of {', '.join(library.precisions)} "
            f"(backend {library.name}), found {assembly.precision!r}"
        )
    for key in ("activations", "kv_cache_dtype"):
        value = getattr(assembly, key)
        if value is not None and key not in library.model_settings:
            raise InputError(
                f"{path}: {key} is not supported by backend {library.name}; got {value}; export without, or use the "
                "backend cuda"
            )


def _engines(
    assembly: Path, graphs: Sequence[tuple[str, GraphFile]], out: Path, manifest: EngineSetManifest, library: Backend
) -> tuple[dict[str, EngineFile], dict[str, Any]]:
    """Build the engines that an earlier set at `out` does not have; return all entries, and what these cost."""
    recorded = _reusable(out, manifest, library)
    engines = {}
    costs = {}
    for number, (name, graph) in enumerate(graphs, start=1):
        graph_path = graph_file(assembly.parent, graph)
        entry = recorded.get(name)
        if entry is None or entry.graph_sha256 != graph.sha256:
            with _progress(library, number, len(graphs), name) as cost:
                entry, built = _build_one(graph_path, graph, out.parent / library.file(name), library, manifest.options)
                cost.update(peak_memory_bytes=built.peak_memory, note=built.note)
            costs[name] = cost
        engines[name] = entry
    return engines, costs


@contextlib.contextmanager
def _progress(library: Backend, number: int, total: int, name: str) -> Iterator[dict[str, Any]]:
    """Print a line on stderr, begun before the engine, so that a killed build says in which; yield its cost."""
    cost: dict[str, Any] = {}

    def say(words: str, end: str = "\n") -> None:
        if library.takes_long:
            print(words, end=end, file=sys.stderr, flush=True)

    say(f"build: engine {number} of {total}: {name} ...", end="")
    start = time.perf_counter()
    try:
        yield cost
    except BaseException:
        say(f" failed after {time.perf_counter() - start:.1f} s")
        raise
    cost["seconds"] = round(time.perf_counter() - start, 3)
    memory = cost["peak_memory_bytes"]
    note = cost.pop("note")
    text = f" {cost['seconds']:.1f} s"
    if memory is not None:
        text += f", {memory / 2**20:.0f} MiB of GPU memory"
    if note:
        text += f"; {note}"
    say(text)


def _build_one(
    graph_path: Path, graph: GraphFile, file: Path, library: Backend, options: Mapping[str, Any]
) -> tuple[EngineFile, Built]:
    """Build one engine; return its entry, with the slots of a rewritten graph, and the result of the build."""
    canonical = onnx.load(graph_path)
    graph.signature.check(signature_of(canonical.graph), str(graph_path), "export again")
    rewritten = canonical
    prepared = None
    if isinstance(graph, RopeGraph):
        rewritten = rotary(canonical, graph.variant)
    elif isinstance(graph, BaseGraph):
        rewritten = run_passes(canonical, WithoutAdapters())
    # Opset 17 has no quantised products: the backend itself rewrites such graphs.
    is_final = isinstance(graph, RopeGraph) or has_quantized_products(canonical) or library.takes_canonical
    if not is_final:
        prepared = prepare(rewritten, graph.signature.slots, options, adapter_rows=isinstance(graph, RowsGraph))
        if prepared is not None:
            rewritten = prepared.model
    if rewritten is canonical:
        built = library.build(graph_path, file, options)
        return EngineFile(file.name, sha256_file(file), graph.sha256, details=built.about), built
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.", suffix=".tmp") as folder:
        rewritten_path = Path(folder) / "prepared.onnx"
        rewritten_path.write_bytes(rewritten.SerializeToString(deterministic=True))
        built = library.build(rewritten_path, file, options)
    entry = EngineFile(file.name, sha256_file(file), graph.sha256, details=built.about)
    if prepared is not None:
        entry = replace(entry, slots=tuple(prepared.slots), parts=prepared.parts)
    return entry, built


def _reusable(out: Path, manifest: EngineSetManifest, library: Backend) -> dict[str, EngineFile]:
    """Return the entries of an engine set at `out` that was made in the same way and whose files are whole."""
    if not out.exists():
        return {}
    try:
        old = EngineSetManifest.load(out)
    except InputError:
        return {}  # another format or half a file of an older version: it is built again
    for name in ("backend", "precision", "backend_version", "builder_revision"):
        if getattr(old, name) != getattr(manifest, name):
            return {}
    # Keys are of this version's device and options only.
    if library.device_key(old.device) != library.device_key(manifest.device):
        return {}
    if library.options_key(old.options) != library.options_key(manifest.options):
        return {}

    def is_whole(entry: EngineFile) -> bool:
        path = out.parent / entry.file
        return path.is_file() and sha256_file(path) == entry.sha256

    return {name: entry for name, entry in old.engines.items() if is_whole(entry) and library.keeps(name, entry)}


def _remove_temporary(folder: Path, files: Iterable[str]) -> None:
    """Remove the temporary folders of killed builds of these engine files."""
    for name in files:
        for path in folder.glob(f".{glob.escape(name)}.*.tmp"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
