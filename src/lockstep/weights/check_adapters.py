"""Check a model's adapters (LoRA, as PEFT saves them) against its checkpoint.

In: their folders. Out: `adapters.json`. No torch, no PEFT.

Settings that would change the base beyond `x A^T B^T` at its linear layers are rejected with the key's name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lockstep.artifacts.adapters import CONFIG, WEIGHTS, AdaptedModule, Adapter, AdaptersManifest, is_target
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.dtypes import FLOAT_DTYPES
from lockstep.artifacts.fetched import FOLDER, load_if_same_source
from lockstep.artifacts.files import recorded_folder, sha256_file
from lockstep.artifacts.places import StoredFile, TensorPlace
from lockstep.checkpoint.language import language_name
from lockstep.checkpoint.packed import packed_weights, unpacked_places
from lockstep.checkpoint.safetensors_header import read_header
from lockstep.checkpoint.source_files import present, read_source_json, shorten
from lockstep.checkpoint.tensors import name_in_checkpoint
from lockstep.config.packing import packing_of
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import remember
from lockstep.weights.adapters import LoadedAdapter, adapter_of_bytes
from lockstep.weights.scan import count_non_finite

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
# A weight of this layout is one row of codes, two a byte; its shape is in the file of weights, which servers may lack.
_SHAPELESS = "bnb4"
_EXPERT = re.compile(r"\.experts\.\d+\.")
# Regular expressions as PEFT's users write them; only single characters repeat, so that matching always ends soon.
_PATTERN = re.compile(r"\^?(?:(?:\\?[\w.]|\[[\w-]+\])[+*]?|\((?:\?:)?[\w|.]+\))+\$?")
_MAX_REPEATS = 3
# Keys of a LoRA other than its rank and scale that do not change its results.
_HARMLESS = frozenset(
    {
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out",
        "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
        "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
        "target_modules", "task_type", "use_rslora",
    }
)  # fmt: skip
# With these, training starts from changed weights of the base, which the adapter then needs.
_CHANGED_BASE = ("pissa", "olora", "loftq", "corda")
_REASONS = {
    "use_dora": "DoRA scales the base's weights",
    "modules_to_save": "whole modules are saved with the adapter",
    "trainable_token_indices": "rows of the embedding were trained",
    "target_parameters": "parameters that are no linear layers (experts) were adapted",
    "layer_replication": "layers are repeated",
}
_RETRAIN = "merge it into the checkpoint with PEFT, or train it without"
# {part of a tensor's name: what PEFT saves so}, the first that fits counts.
_KINDS = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_": "an adapter of the embedding",
    "modules_to_save": "a module that was saved whole",
    "bias": "a bias",
    "lora_": "another layout",
}


def resolve_adapters(
    sources: Mapping[str, str],
    folders: Mapping[str, Path],
    checkpoint_json: Path,
    max_lora_rank: int,
    targets: Collection[str] | None,
    out: Path,
) -> Path:
    """Check the adapters in `folders` against the checkpoint and write their manifest to `out`, which is returned.

    sources: the config's text for each. targets: names of modules that adapters may have; None: any. Raises InputError
    for the first that is not a plain LoRA of this checkpoint.
    """
    checkpoint = CheckpointManifest.load(checkpoint_json)
    out = Path(out)
    adapters = {}
    for name in sorted(sources):
        folder = Path(folders[name])
        where = f"adapter {name!r}"
        checked = check_folder(folder, checkpoint, where)
        if checked.rank > max_lora_rank:
            raise InputError(
                f"{where}: {folder / CONFIG}: expected a rank (r) of at most {max_lora_rank} (max_lora_rank), found "
                f"{checked.rank}; raise max_lora_rank"
            )
        for module in checked.modules:
            if targets is not None and not is_target(module, targets):
                raise InputError(
                    f"{where}: {folder / WEIGHTS}: expected modules of lora_target_modules ({', '.join(targets)}), "
                    f"found {module}; add it there"
                )
        recorded = recorded_folder(sources[name], folder, out)
        commit = ""
        if folder.name == FOLDER:
            fetched = load_if_same_source(folder.with_name("source.json"), sources[name])
            if fetched is not None:
                commit = fetched.commit or ""
        adapters[name] = replace(checked, source=sources[name], folder=recorded, commit=commit)
    AdaptersManifest(adapters).save(out)
    return out


def read_folder(folder: Path, name: str, checkpoint: CheckpointManifest, max_bytes: int) -> LoadedAdapter:
    """Check an adapter's folder and read it.

    max_bytes: of its file of matrices. Raises InputError for one that is not a plain LoRA of this checkpoint, is too
    large, or changes meanwhile.
    """
    where = f"adapter {name!r}"
    path = folder / WEIGHTS
    size = path.stat().st_size if path.is_file() else 0
    if size > max_bytes:
        raise InputError(
            f"{where}: {path}: expected at most {max_bytes} bytes, which an adapter of max_lora_rank has, found {size}"
        )
    try:
        adapter = check_folder(folder, checkpoint, where)
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{where}: {folder}: expected a folder that can be read, found {error.strerror}") from None
    # The file may have been replaced since its header and its numbers were checked.
    (digest,) = (file.sha256 for file in adapter.files if file.path == WEIGHTS)
    if hashlib.sha256(data).hexdigest() != digest:
        raise InputError(f"{where}: {path}: expected a file that stays as it is, found one that changed; try again")
    return adapter_of_bytes(name, adapter, np.frombuffer(data, np.uint8), folder)


def check_folder(folder: Path, checkpoint: CheckpointManifest, where: str) -> Adapter:
    """Check an adapter's folder and return its entry for the manifest, without a source.

    where: start of messages. Raises InputError for one that is not a plain LoRA of this checkpoint.
    """
    if not folder.is_dir():
        actual = "a file" if folder.exists() else "nothing"
        raise InputError(f"{where}: {folder}: expected the folder of an adapter, found {actual}; correct its source")
    config = _read_config(folder, where)
    path = folder / WEIGHTS
    if not present(path):
        pickled = ", ".join(file.name for file in sorted(folder.glob("adapter_model.*")))
        actual = "none"
        if pickled:
            actual = f"pickled weights ({pickled}), which can run code when they are opened"
        raise InputError(
            f"{where}: {folder}: expected {WEIGHTS}, found {actual}; save it with "
            "PeftModel.save_pretrained(folder, safe_serialization=True)"
        )
    matrices = _modules(path, read_header(path), config, where)
    packing = packing_of(checkpoint.config)
    weights = checkpoint.tensors
    if packing is None or packing.layout != _SHAPELESS:
        weights = unpacked_places(weights, packed_weights(packing, weights, Path(checkpoint.source)))
    scale = _scale(config, "")
    modules = {}
    scales = {}
    for name, entry in matrices.items():
        module = language_name(name)  # an adapter may have been trained in a wrapper of the language model
        modules[module] = entry
        if _scale(config, name) != scale:
            scales[module] = _scale(config, name)
        _check_against_base(f"{where}: {path}", module, entry, checkpoint, weights, config)
        for place in (entry.a, entry.b):
            _check_finite(path, module, place, where)
    rank = max(module.rank for module in modules.values())
    files = []
    for name in (CONFIG, WEIGHTS):
        digest = sha256_file(folder / name)
        # So that readers of the manifest need not hash the file again.
        remember(folder / name, digest)
        files.append(StoredFile(name, (folder / name).stat().st_size, digest))
    base = config.get("base_model_name_or_path")
    base_model = base if isinstance(base, str) else ""
    return Adapter("", ".", tuple(files), rank, scale, base_model, modules, scales=scales)


def _of_module(config: Mapping[str, Any], pattern: str, key: str, module: str) -> Any:
    """Return a setting of a module as PEFT reads it: of the first pattern that matches the module's name or its end."""
    for name, value in (config.get(pattern) or {}).items():
        if re.match(rf"(.*\.)?({name})$", module):
            return value
    return config[key]


def _is_pattern(text: str) -> bool:
    """Return whether a key of `rank_pattern` is a regular expression that is supported."""
    if not _PATTERN.fullmatch(text) or sum(map(text.count, "+*")) > _MAX_REPEATS:
        return False
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _scale(config: Mapping[str, Any], module: str) -> float:
    rank = _of_module(config, "rank_pattern", "r", module)
    alpha = _of_module(config, "alpha_pattern", "lora_alpha", module)
    if config.get("use_rslora"):
        rank = math.sqrt(rank)
    return float(alpha / rank)


def _read_config(folder: Path, where: str) -> dict[str, Any]:
    path = folder / CONFIG
    if not present(path):
        raise InputError(f"{where}: {folder}: expected {CONFIG}, found none; give a folder that PEFT saved")
    config = read_source_json(path)

    def refuse(expected: str, actual: str, remedy: str) -> NoReturn:
        raise InputError(f"{where}: {path}: expected {expected}, found {actual}; {remedy}")

    if config.get("peft_type") != "LORA":
        refuse("peft_type LORA", shorten(config.get("peft_type")), "other kinds of adapters cannot be used")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, Mapping) or not all(map(_is_pattern, patterns)):
            refuse(f"names of modules in {key}, or simple regular expressions", shorten(config[key]), _RETRAIN)
    for rank in (config.get("r"), *(config.get("rank_pattern") or {}).values()):
        if type(rank) is not int or rank < 1:
            refuse("a rank (r) of 1 or more", shorten(rank), "correct it")
    for alpha in (config.get("lora_alpha", 0), *(config.get("alpha_pattern") or {}).values()):
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha) or alpha == 0:
            # With 0 the adapter would compute the same as the base model.
            refuse("a finite lora_alpha other than 0", shorten(alpha), "correct it")
    bias = config.get("bias", "none")
    if bias != "none":
        refuse("bias 'none'", shorten(bias), _RETRAIN)
    if config.get("lora_bias"):
        refuse("bias 'none'", shorten(True), _RETRAIN)
    initialization = config.get("init_lora_weights")
    if isinstance(initialization, str) and initialization.lower().startswith(_CHANGED_BASE):
        refuse(
            "weights that begin on the base as it is (init_lora_weights)",
            shorten(initialization),
            "save it with path_initial_model_for_weight_conversion, which makes a plain LoRA of it",
        )
    for key in sorted(set(config) - _HARMLESS - {"bias", "lora_bias", "init_lora_weights"}):
        if config[key]:
            why = _REASONS.get(key, "a setting that changes the computation, or that is not known here")
            refuse(f"a LoRA without {key} ({why})", shorten(config[key]), _RETRAIN)
    return config


def _modules(
    path: Path, tensors: Mapping[str, TensorPlace], config: Mapping[str, Any], where: str
) -> dict[str, AdaptedModule]:
    """Return each module's two matrices, after checking their rank against the config."""
    matrices: dict[str, dict[str, TensorPlace]] = {}
    for name, place in sorted(tensors.items()):
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise InputError(
                f"{where}: {path}: expected lora_A and lora_B of linear layers "
                f"(base_model.model.<module>.lora_A.weight), found {shorten(name)} ({_kind(name)}); {_RETRAIN}"
            )
        if place.dtype not in FLOAT_DTYPES:
            raise InputError(
                f"{where}: {path}: tensor {name!r}: expected one of {', '.join(FLOAT_DTYPES)}, found {place.dtype}; "
                "save it in one of them"
            )
        matrices.setdefault(match["module"], {})[match["side"]] = place
    if not matrices:
        raise InputError(f"{where}: {path}: expected lora_A and lora_B of linear layers, found none; save it again")
    modules = {}
    for module, sides in matrices.items():
        for side in "AB":
            if side not in sides:
                raise InputError(
                    f"{where}: {path}: expected base_model.model.{module}.lora_{side}.weight, found only its other "
                    "half; save the adapter again"
                )
        # Graphs add adapters to layers that every token passes; an expert sees only some tokens.
        if _EXPERT.search(module):
            raise InputError(
                f"{where}: {path}: expected linear layers that every token passes, found {module} of an expert; "
                f"{_RETRAIN}"
            )
        a = sides["A"]
        b = sides["B"]
        rank = _of_module(config, "rank_pattern", "r", module)
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise InputError(
                f"{where}: {path}: {module}: expected lora_A [{rank}, in_features] and lora_B [out_features, {rank}], "
                f"found {list(a.shape)} and {list(b.shape)}; are A and B, or r in {CONFIG}, of another adapter?"
            )
        modules[module] = AdaptedModule(a, b)
    return modules


def _kind(name: str) -> str:
    for substring, kind in _KINDS.items():
        if substring in name:
            return kind
    return "no part of a LoRA"


def _check_against_base(
    where: str,
    module: str,
    entry: AdaptedModule,
    checkpoint: CheckpointManifest,
    weights: Mapping[str, TensorPlace],
    config: Mapping[str, Any],
) -> None:
    """Check that a module's matrices fit a linear weight of the checkpoint.

    weights: of the checkpoint, packed ones with their unpacked shape. config: of the adapter. Raises InputError where
    they do not fit.
    """
    base = weights.get(name_in_checkpoint(f"{module}.weight", weights))
    remedy = "is it an adapter of this model?"
    if trained_on := config.get("base_model_name_or_path"):
        remedy = f"is it an adapter of this model (trained on {shorten(trained_on)})?"
    if base is None:
        raise InputError(
            f"{where}: expected modules of the base ({checkpoint.source}, {checkpoint.model_type}), found "
            f"{module}, whose weight the checkpoint does not have; {remedy}"
        )
    shape = list(base.shape)
    if config.get("fan_in_fan_out"):  # the base holds its weights as [in_features, out_features], as GPT-2 does
        shape.reverse()
    actual = [entry.b.shape[0], entry.a.shape[1]]
    is_two_a_byte = base.dtype == "U8" and 2 * math.prod(base.shape) == math.prod(actual)  # of `_SHAPELESS`
    if shape != actual and not is_two_a_byte:
        raise InputError(
            f"{where}: {module}: expected [out_features, in_features] {shape} as the base "
            f"({checkpoint.source}) has, found {actual}; {remedy}"
        )


def _check_finite(path: Path, module: str, place: TensorPlace, where: str) -> None:
    with open(path, "rb") as file:
        file.seek(place.offset)
        non_finite = count_non_finite(place.dtype, np.frombuffer(file.read(place.length), np.uint8))
    if non_finite:
        raise InputError(
            f"{where}: {path}: {module}: expected finite numbers, found {non_finite.nans} NaN and "
            f"{non_finite.infinities} infinite; download it again, or use another adapter if it was trained to this"
        )
