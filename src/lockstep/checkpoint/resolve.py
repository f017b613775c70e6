"""Resolve a source named in the config to a checkpoint's manifest, `checkpoint.json`. Needs no torch.

The manifest pins every file that later stages may read by size and sha256, and records each tensor's bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.fetched import Fetched, folder_of
from lockstep.artifacts.files import dump_json, recorded_folder, remove_leftovers, sha256_file
from lockstep.artifacts.places import StoredFile
from lockstep.checkpoint.chat_template import read_chat_template, without_default
from lockstep.checkpoint.fit import check_fit
from lockstep.checkpoint.language import towers
from lockstep.checkpoint.own_head import check_own_head, embedding_of_head
from lockstep.checkpoint.packed import check_unpacked, packed_weights, quantized_tensors, unpacked_places
from lockstep.checkpoint.source_files import check_side_file, present, read_source_json, shorten
from lockstep.checkpoint.stops import described, stop_ids
from lockstep.checkpoint.tensors import INDEX, SINGLE, CheckpointTensors, find_tensors
from lockstep.checkpoint.tokenizer_file import check_loads, check_present, load_as_transformers
from lockstep.config import model_config
from lockstep.config.packing import packing_of
from lockstep.errors import InputError, note
from lockstep.manifests.digest_cache import remember

# Files of a hub model other than its weights, as transformers names them.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# Keys of generation_config.json that choose tokens, with their neutral values.
_SAMPLING_KEYS: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1,),
    "top_k": (0, 50),
    "top_p": (1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), ()),
}
_HASH_THREADS = min(8, os.cpu_count() or 1)


def resolve(source: str, folder: Path, out: Path) -> Path:
    """Write the manifest of the checkpoint in `folder` to `out`, and return `out`.

    source: the config's text, which is recorded. Its scheme is the kind of source; if it is relative, so is the
    manifest's "folder". Raises InputError for anything that a checkpoint may lack.
    """
    return _save(_manifest(source, Path(folder), Path(out), weights=True), Path(out))


def resolve_architecture(source: str, folder: Path, out: Path) -> Path:
    """Resolve a checkpoint without reading weights.

    As `resolve`, but the manifest has no tensors, and names the files of config and tokenizer only. Of weights that are
    quantised already the headers are read: graphs depend on the packing.

    Graphs are made from it, so that other weights of the same model, a fine-tune, do not change graphs and engines. The
    tokenizer, which is exported with the graphs, is loaded. Notes say where texts are split otherwise than by
    tokenizer.json alone, and which tokens end an answer if files disagree.
    """
    folder = Path(folder)
    out = Path(out)
    manifest = _manifest(source, folder, out, weights=False)
    check_loads(folder / "tokenizer.json")
    tokenizer = load_as_transformers(folder)
    packing = packing_of(manifest.config)
    packing_note = packing.described() if packing else ""
    stops = described(stop_ids(folder, manifest.config, tokenizer.eos_token_id))
    for line in (packing_note, tokenizer.note, without_default(folder), stops, sampling_note(folder)):
        if line:
            note(f"{folder}: {line}")
    return _save(manifest, out)


def sampling_note(folder: Path) -> str:
    """Return a note about sampling settings in generation_config.json, which requests set instead; "" for none."""
    path = folder / "generation_config.json"
    if not present(path):
        return ""
    settings = read_source_json(path)
    ignored = []
    for key, neutral in _SAMPLING_KEYS.items():
        value = settings.get(key)
        if value is not None and value not in neutral:
            ignored.append(f"{key} {shorten(value)}")
    if not ignored:
        return ""
    return f"requests say how tokens are chosen, not {path.name}: {', '.join(ignored)}"


def resolve_fetched(source_json: Path, out: Path) -> Path:
    """Resolve a checkpoint that was fetched or made.

    As `resolve`, and its commit is recorded. Raises InputError also when a file is not the one that was fetched.
    """
    fetched = Fetched.load(source_json)
    folder = folder_of(Path(source_json))
    out = Path(out)
    manifest = _manifest(fetched.source, folder, out, weights=True)
    for file in manifest.files:
        expected = fetched.sha256.get(file.path)
        if file.sha256 != expected:
            path = os.path.realpath(folder / file.path)
            raise InputError(
                f"{path}: expected the file that was fetched (sha256 {expected}), found "
                f"{file.sha256}; delete it and {source_json}, then run again"
            )
    return _save(replace(manifest, commit=fetched.commit), out)


def _manifest(source: str, folder: Path, out: Path, weights: bool) -> CheckpointManifest:
    return replace(describe(folder, weights), source=source, folder=recorded_folder(source, folder, out))


def _save(manifest: CheckpointManifest, out: Path) -> Path:
    remove_leftovers(out)
    manifest.save(out)
    return out


def describe(folder: Path, weights: bool = True) -> CheckpointManifest:
    """Return the manifest of a local checkpoint folder, without a source and relative to that folder.

    Without `weights` it has no weight files and no tensors.
    """
    if not folder.is_dir():
        actual = "a file" if folder.exists() else "nothing"
        raise InputError(f"{folder}: expected the folder of a checkpoint, found {actual}; correct the model's source")
    config = _read_config(folder)
    depth = _layer_count(folder, config)
    packing = packing_of(config)
    no_tensors = CheckpointTensors((), {}, ())
    checkpoint = no_tensors
    if weights or packing:  # graphs depend on the packing
        checkpoint = embedding_of_head(folder, config, find_tensors(folder))
    packed = packed_weights(packing, checkpoint.tensors, folder)
    if weights:
        if checkpoint.absent:
            name, shard = next(iter(checkpoint.absent.items()))
            what = shorten(name)
            if len(checkpoint.absent) > 1:
                what += f" and {len(checkpoint.absent) - 1} more"
            note(f"{folder / INDEX}: names {shard} for {what}, which is absent there and left out")
        if checkpoint.tower_tensors:
            unused = checkpoint.tower_tensors
            note(f"{folder}: the language model is used; {len(unused)} tensors of {towers(unused)} are not")
        if packing is None:
            check_unpacked(folder, checkpoint.tensors)
        check_fit(folder, config, checkpoint, packed)
        check_own_head(folder, config, unpacked_places(checkpoint.tensors, packed))
    else:  # they were read for the packing alone
        checkpoint = no_tensors
    check_present(folder)
    stop_ids(folder, config, None)  # fails now, not after hours of work on graphs
    for path in side_files(folder):
        check_side_file(path)
    read_chat_template(folder)
    names = [path.name for path in sorted([*side_files(folder), *weight_files(folder, checkpoint)])]
    quantization = None
    if packing and packing.stays:
        quantization = quantized_tensors(packing, packed, folder)
    return CheckpointManifest(
        source="",
        folder=".",
        files=_hash_files(folder, names),
        model_type=config["model_type"],
        num_hidden_layers=depth,
        config=config,
        tensors=checkpoint.tensors,
        unindexed=checkpoint.unindexed,
        quantization=quantization,
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not present(path):
        raise InputError(f"{folder}: expected config.json, found none; give a model folder in Hugging Face format")
    config = read_source_json(path)
    if not isinstance(config.get("model_type"), str):
        actual = shorten(config.get("model_type"))
        raise InputError(
            f"{path}: expected a model_type such as 'llama', found {actual}; use the config.json "
            f"that came with the weights"
        )
    error = model_config.first_error(config)
    if error is not None:
        raise InputError(
            f"{path}: expected {error.expected} as {error.where}, found {shorten(error.actual)}; correct it"
        )
    try:
        dump_json(config).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected JSON, found a value that JSON cannot hold ({error}); correct it") from None
    return config


def _layer_count(folder: Path, config: dict[str, Any]) -> int:
    """Return the number of layers in config.json, under the architecture's key or in a wrapper's `text_config`."""
    depth, _ = model_config.depth(config)
    if depth is None and model_config.setting(config, ("decoder_layers",)) is not None:
        raise InputError(
            f"{folder / 'config.json'}: expected a decoder-only model, found an encoder-decoder (decoder_layers), whose"
            " decoder attends to an encoder's tokens; use another model"
        )
    if depth is None:
        raise InputError(
            f"{folder / 'config.json'}: expected num_hidden_layers, found none; write the model's layer count there"
        )
    return depth


def side_files(folder: Path) -> list[Path]:
    """Return a checkpoint folder's files of config and tokenizer, sorted."""
    return sorted(folder / name for name in SIDE_FILES if present(folder / name))


def weight_files(folder: Path, checkpoint: CheckpointTensors) -> list[Path]:
    """Return a checkpoint folder's files of tensors and their index, sorted."""
    names = [*checkpoint.files]
    if names and names != [SINGLE]:
        names.append(INDEX)
    return sorted(folder / name for name in names)


def _hash_files(folder: Path, names: Iterable[str]) -> tuple[StoredFile, ...]:
    def entry(name: str) -> StoredFile:
        path = folder / name
        sha256 = sha256_file(path)
        remember(path, sha256)
        return StoredFile(name, path.stat().st_size, sha256)

    with ThreadPoolExecutor(_HASH_THREADS) as pool:  # hashlib releases the interpreter lock
        return tuple(pool.map(entry, names))
