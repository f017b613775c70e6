"""Find the tensors of a checkpoint folder: in one `model.safetensors`, or in shards with an index."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.artifacts.checkpoint import UnindexedTensor
from lockstep.artifacts.places import TensorPlace
from lockstep.checkpoint.language import language_tensors
from lockstep.checkpoint.safetensors_header import MAX_TENSORS, read_header
from lockstep.checkpoint.source_files import present, read_source_json, shorten
from lockstep.errors import InputError, truncate

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
# A constant of older code, not a weight: the score of a masked key, infinite in float16 (GPT-NeoX, Pythia, GPT-J).
_CONSTANT = ".masked_bias"


@dataclass(frozen=True)
class CheckpointTensors:
    """The tensors of a checkpoint folder.

    files: names of their files. tensors: {name: place} of the language model. unindexed: tensors in a shard that the
    index does not name there. tower_tensors: names of a wrapper's other tensors. absent: {tensor: shard} of tensors
    that the index names and the shard lacks; the model may not need them.
    """

    files: tuple[str, ...]
    tensors: dict[str, TensorPlace]
    unindexed: tuple[UnindexedTensor, ...]
    tower_tensors: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)


def name_in_checkpoint(name: str, tensors: Container[str]) -> str:
    """Return a tensor's name in a checkpoint: those of a bare decoder leave out the first part ("transformer.")."""
    if name in tensors:
        return name
    return name.partition(".")[2]


def has_weights(folder: Path) -> bool:
    """Return whether the folder has the files that `find_tensors` reads. Raises InputError for a broken link."""
    return present(folder / SINGLE) or present(folder / INDEX)


def find_tensors(folder: Path) -> CheckpointTensors:
    """Read the headers of the folder's safetensors files; as in transformers, a single file goes before an index.

    Raises InputError when there are none, when a shard is absent or damaged, and for a tensor in two shards.
    """
    if present(folder / SINGLE):
        checkpoint = CheckpointTensors((SINGLE,), read_header(folder / SINGLE), ())
    elif present(folder / INDEX):
        checkpoint = _read_shards(folder)
    else:
        _refuse_weights(folder)
    if not checkpoint.tensors:
        raise InputError(
            f"{folder}: expected tensors in {', '.join(checkpoint.files)}, found none; download the checkpoint again"
        )
    weights = {name: place for name, place in checkpoint.tensors.items() if not name.endswith(_CONSTANT)}
    tensors, tower_tensors = language_tensors(weights)
    return replace(checkpoint, tensors=tensors, tower_tensors=tower_tensors)


def _read_shards(folder: Path) -> CheckpointTensors:
    weight_map = _read_index(folder / INDEX)
    counts = Counter(weight_map.values())
    shards = {shard: _read_shard(folder, shard, counts[shard]) for shard in sorted(counts)}
    _check_unique(folder, shards, weight_map)
    tensors = {name: shards[shard][name] for name, shard in weight_map.items() if name in shards[shard]}
    unindexed = []
    for shard, places in shards.items():
        unindexed += [UnindexedTensor(shard, name) for name in sorted(places) if weight_map.get(name) != shard]
    absent = {name: shard for name, shard in weight_map.items() if name not in tensors}
    checkpoint = CheckpointTensors(tuple(shards), tensors, tuple(unindexed), absent=absent)
    for tensor in unindexed:  # an error if the index names another shard for it
        check_not_absent(folder, tensor.tensor, checkpoint)
    return checkpoint


def check_not_absent(folder: Path, name: str, checkpoint: CheckpointTensors) -> None:
    """Raise InputError for a tensor that the model needs, the index names and its shard lacks."""
    shard = checkpoint.absent.get(name)
    if shard is not None:
        raise InputError(
            f"{folder / shard}: expected tensor {shorten(name)}, as {INDEX} says, found it absent; download this shard "
            "and the index again"
        )


def _check_unique(folder: Path, shards: dict[str, dict[str, TensorPlace]], weight_map: Mapping[str, str]) -> None:
    """Raise InputError for a tensor in two shards: transformers uses the one that it reads last, not the index's."""
    first: dict[str, str] = {}
    for shard, places in shards.items():
        for name in places:
            if first.setdefault(name, shard) != shard:
                raise InputError(
                    f"{folder / shard}: expected each tensor in one shard, found {shorten(name)} also in {first[name]} "
                    f"({INDEX} names {weight_map.get(name, 'neither')}); download both and the index again"
                )


def indexed_shards(index: Path) -> list[str]:
    """Return the files that an index of shards names, sorted. Raises InputError for a damaged index."""
    return sorted(set(_read_index(index).values()))


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_source_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InputError(
            f"{path}: expected weight_map, an object of tensor names and file names, found "
            f"{shorten(weight_map)}; download the index again"
        )
    if len(weight_map) > MAX_TENSORS:
        raise InputError(
            f"{path}: expected at most {MAX_TENSORS} tensors, found {len(weight_map)}; use a checkpoint whose experts"
            " are stacked, or another model"
        )
    for shard in sorted(set(weight_map.values())):
        is_plain = shard.isprintable() and len(shard.encode()) <= 255 and Path(shard).name == shard
        if not is_plain or not shard.endswith(".safetensors"):
            raise InputError(
                f"{path}: expected names of safetensors files next to the index, found "
                f"{shorten(shard)}; download the index again"
            )
    return weight_map


def _read_shard(folder: Path, shard: str, count: int) -> dict[str, TensorPlace]:
    """Read the header of a shard, for which the index names `count` tensors. Raises InputError where it is absent."""
    if not present(folder / shard):
        raise InputError(
            f"{folder / shard}: expected this shard, which {INDEX} names for {count} tensors, "
            f"found no such file; download it"
        )
    return read_header(folder / shard)


def _refuse_weights(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    safetensors = [name for name in names if name.endswith(".safetensors")]
    pickled = [name for name in names if name.endswith(_PICKLED) and name != "training_args.bin"]
    if "adapter_config.json" in names:
        actual = "an adapter (adapter_config.json)"
        remedy = "merge it into its base model (peft: merge_and_unload) and save that"
    elif safetensors:
        actual = f"only {truncate(', '.join(safetensors))}"
        remedy = f"download {INDEX} for shards, or rename a single file to {SINGLE}"
    elif pickled:
        actual = f"pickled weights ({truncate(', '.join(pickled))}), which can run code when they are opened"
        remedy = (
            'convert them once: python -c "import sys, transformers; d = sys.argv[1]; '
            "transformers.AutoModelForCausalLM.from_pretrained(d, dtype='auto').save_pretrained(d)\" "
            f"{shlex.quote(str(folder))}"
        )
    else:
        actual = "no weights"
        remedy = "download the whole checkpoint"
    raise InputError(f"{folder}: expected {SINGLE} or {INDEX}, found {actual}; {remedy}")
