"""Resolve a source named in the config to a checkpoint's manifest.

Out: `checkpoint.json`. Needs no torch.

The manifest pins every file that later stages may read by size and sha256, and gives each tensor's place in bytes.
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
from lockstep.artifacts.files import dump_json, remove_leftovers, sha256_file
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

# What a hub model brings beside its weights, as transformers names it.
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
# Keys of generation_config.json that choose tokens, and what changes nothing.
_CHOOSES: Mapping[str, tuple[Any, ...]] = {
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

    `source` is the config's text for it: it is recorded, its scheme says what kind of source it is, and whether it is
    relative decides whether the manifest's "folder" is relative to the manifest. Raises InputError for all that a
    checkpoint may lack.
    """
    return _save(_manifest(source, Path(folder), Path(out), weights=True), Path(out))


def resolve_architecture(source: str, folder: Path, out: Path) -> Path:
    """Resolve a checkpoint without reading weights.

    As `resolve`, but the manifest has no tensors, and names the files of config and tokenizer only. Of weights that are
    quantised already the headers are read: graphs depend on what is packed, and how.

    Graphs are made from it, so that other weights of the same model, a fine-tune, leave graphs and engines alone. The
    tokenizer, which lies beside graphs, is loaded. Lines on stderr say where texts are split otherwise than by
    tokenizer.json alone, and which tokens end an answer where that is not said in one way.
    """
    folder = Path(folder)
    out = Path(out)
    manifest = _manifest(source, folder, out, weights=False)
    check_loads(folder / "tokenizer.json")
    tokenizer = load_as_transformers(folder)
    packing = packing_of(manifest.config)
    read = packing.described() if packing else ""
    stops = described(stop_ids(folder, manifest.config, tokenizer.eos_token_id))
    for line in (read, tokenizer.note, without_default(folder), stops, _not_chosen(folder)):
        if line:
            note(f"{folder}: {line}")
    return _save(manifest, out)


def _not_chosen(folder: Path) -> str:
    """Return what generation_config.json says of choosing tokens, which is for requests to say; "" for nothing."""
    path = folder / "generation_config.json"
    settings = read_source_json(path) if present(path) else {}
    found = [
        f"{key} {shorten(settings[key])}"
        for key, neutral in _CHOOSES.items()
        if settings.get(key) is not None and settings[key] not in neutral
    ]
    return f"requests say how tokens are chosen, not {path.name}: {', '.join(found)}" if found else ""


def resolve_fetched(source_json: Path, out: Path) -> Path:
    """Resolve a checkpoint that was fetched or made.

    As `resolve`; its commit is recorded too. Raises InputError also when a file is not the one that was fetched.
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
    return replace(describe(folder, weights), source=source, folder=_recorded_folder(source, folder, out))


def _save(manifest: CheckpointManifest, out: Path) -> Path:
    remove_leftovers(out)
    manifest.save(out)
    return out


def describe(folder: Path, weights: bool = True) -> CheckpointManifest:
    """Return the manifest of a local checkpoint folder, without a source.

    It is as it would stand in that folder. Without `weights` it lists none of their files and no tensors.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder}: expected the folder of a checkpoint, found "
            f"{'a file' if folder.exists() else 'nothing'}; correct the model's source"
        )
    config = _read_config(folder)
    depth = _layer_count(folder, config)
    packing = packing_of(config)
    found = find_tensors(folder) if weights or packing else CheckpointTensors((), {}, ())
    found = embedding_of_head(folder, config, found)
    packed = packed_weights(packing, found.tensors, folder)
    if weights:
        if found.absent:
            name, shard = next(iter(found.absent.items()))
            more = f" and {len(found.absent) - 1} more" if len(found.absent) > 1 else ""
            note(f"{folder / INDEX}: names {shard} for {shorten(name)}{more}, which is absent there and left out")
        if found.others:
            note(
                f"{folder}: the language model is used; {len(found.others)} tensors of {towers(found.others)} are left"
                " alone"
            )
        if packing is None:
            check_unpacked(folder, found.tensors)
        check_fit(folder, config, found, packed)
        check_own_head(folder, config, unpacked_places(found.tensors, packed))
    else:
        found = CheckpointTensors((), {}, ())
    check_present(folder)
    stop_ids(folder, config, None)  # ids, before hours are spent on graphs
    for path in side_files(folder):
        check_side_file(path)
    read_chat_template(folder)
    names = [path.name for path in sorted([*side_files(folder), *weight_files(folder, found)])]
    return CheckpointManifest(
        source="",
        folder=".",
        files=_hash_files(folder, names),
        model_type=config["model_type"],
        num_hidden_layers=depth,
        config=config,
        tensors=found.tensors,
        unindexed=found.unindexed,
        quantization=quantized_tensors(packing, packed, folder) if packing and packing.stays else None,
    )


def _recorded_folder(source: str, folder: Path, out: Path) -> str:
    if os.path.isabs(source):
        return os.path.abspath(folder)
    # Of real paths, because `..` after a linked folder leads to the parent of what the link points to.
    return Path(os.path.relpath(os.path.realpath(folder), os.path.realpath(out.parent))).as_posix()


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not present(path):
        raise InputError(f"{folder}: expected config.json, found none; give a model folder in Hugging Face format")
    config = read_source_json(path)
    if not isinstance(config.get("model_type"), str):
        found = shorten(config.get("model_type"))
        raise InputError(
            f"{path}: expected a model_type such as 'llama', found {found}; use the config.json "
            f"that came with the weights"
        )
    if wrong := model_config.first_error(config):
        found = shorten(wrong.found)
        raise InputError(f"{path}: expected {wrong.expected} as {wrong.where}, found {found}; correct it")
    try:
        dump_json(config).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected JSON, found a value that JSON cannot hold ({error}); correct it") from None
    return config


def _layer_count(folder: Path, config: dict[str, Any]) -> int:
    """Return the number of layers that config.json gives.

    It stands under the name that the architecture gives it; models of text and images keep it in `text_config`. Raises
    InputError where it is absent.
    """
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
    """Return the files of a checkpoint folder that hold no weights, sorted.

    They are those of config and tokenizer.
    """
    return sorted(folder / name for name in SIDE_FILES if present(folder / name))


def weight_files(folder: Path, found: CheckpointTensors) -> list[Path]:
    """Return the files that hold a checkpoint folder's tensors, sorted.

    Their index is among them.
    """
    index = [INDEX] if found.files and found.files != (SINGLE,) else []
    return sorted(folder / name for name in [*index, *found.files])


def _hash_files(folder: Path, names: Iterable[str]) -> tuple[StoredFile, ...]:
    def entry(name: str) -> StoredFile:
        path = folder / name
        sha256 = sha256_file(path)
        remember(path, sha256)
        return StoredFile(name, path.stat().st_size, sha256)

    with ThreadPoolExecutor(_HASH_THREADS) as pool:  # hashlib lets go of the interpreter lock
        return tuple(pool.map(entry, names))
