"""The `source` of a model, and the facts of it that are checked before a run.

Four kinds: a checkpoint folder; `model.gguf`, a GGUF file; `hf:org/name@revision`, a repository on the Hugging Face
hub; `random:config.json?seed=0`, random weights in the shape of a config. Nothing is fetched or made here.
"""

from __future__ import annotations

import math
import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config import gguf_file, model_config
from lockstep.config.packing import KEY, Packing, packing_of
from lockstep.errors import InputError

_PACKAGE = Path(__file__).resolve().parents[1]
# Where Snakefile, envs and resources lie: in a checkout, else where the wheel puts them.
REPOSITORY = next(
    (
        folder
        for folder in (_PACKAGE.parents[1], Path(sysconfig.get_path("data"), "share/lockstep"))
        if (folder / "Snakefile").is_file()
    ),
    _PACKAGE.parent / "share/lockstep",  # of `pip install --target`
)
HUB_PREFIX = "hf:"
RANDOM_PREFIX = "random:"
BYTES = 256  # tokens that a random model needs, so that any prompt can be spelled
_LONGROPE = ("longrope", "su")  # Phi-3's first name for it
# The hub's own rules for names, and those of git for branches and tags as far as they fit in a URL and a file
# name.
_REPOSITORY_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w.+/-]{0,199}", re.ASCII)
# Sources that are no folders, where there is no such folder.
_HUB_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface|hf)\.co/([\w.-]+/[\w.-]+)(?:/(?:tree|blob|resolve)/([\w.-]+).*)?/?",
    re.ASCII,
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://|git@|www\.", re.ASCII)
_ORG_AND_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w.+/-]+)?", re.ASCII)
_SEED = re.compile(r"[0-9]{1,18}", re.ASCII)
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class FolderSource:
    """A checkpoint folder, as the config writes it."""

    path: str


@dataclass(frozen=True)
class HubSource:
    """A model repository on the Hugging Face hub, at a branch, a tag or a commit."""

    repository: str
    revision: str = "main"


@dataclass(frozen=True)
class RandomSource:
    """Random weights for the model of a `config.json`, as the config writes its path."""

    config: str
    seed: int = 0


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file, as the config writes its path."""

    path: str


class SourceError(InputError):
    """A source that is of no kind; `expected` says what its kind looks like."""

    def __init__(self, expected: str, text: str) -> None:
        super().__init__(f"expected {expected}; found {text!r}")
        self.expected = expected


def parse_source(text: str) -> FolderSource | GgufSource | HubSource | RandomSource:
    """Return the source that the config names. Raises SourceError for an invalid one of the hub or random one."""
    if text.startswith(HUB_PREFIX):
        repository, at, revision = text.removeprefix(HUB_PREFIX).partition("@")
        # The hub allows none of these three in a name; "--" separates names in its cache's folders.
        fits = _REPOSITORY_ID.fullmatch(repository) and not re.search(r"\.\.|--|\.git$", repository)
        if not fits or (at and not (_REVISION.fullmatch(revision) and ".." not in revision)):
            raise SourceError("hf:org/name or hf:org/name@revision (a branch, a tag or a commit)", text)
        return HubSource(repository, revision or "main")
    if text.startswith(RANDOM_PREFIX):
        path, question, query = text.removeprefix(RANDOM_PREFIX).partition("?")
        name, _, seed = query.partition("=")
        if not path or (question and not (name == "seed" and _SEED.fullmatch(seed))):
            raise SourceError("random:path/to/config.json or random:path/to/config.json?seed=0", text)
        return RandomSource(path, int(seed or 0))
    if text.endswith(gguf_file.SUFFIX):
        return GgufSource(text)
    return FolderSource(text)


def kind_of(text: str) -> str:
    """Return what `source` in the config names: folder, gguf, hub or random."""
    kinds = {FolderSource: "folder", GgufSource: "gguf", HubSource: "hub", RandomSource: "random"}
    return kinds[type(parse_source(text))]


def source_folders() -> tuple[Path, ...]:
    """Return where a relative source is looked up: working directory, then repository."""
    return (Path.cwd(), REPOSITORY)


def resolve_here(
    source: FolderSource | GgufSource | RandomSource, folders: Sequence[str | os.PathLike] | None = None
) -> Path:
    """Return what holds the shape of a model that is here: its folder, its config.json or its GGUF file.

    A relative path is looked up in `folders` (default: `source_folders()`), and the first that exists is taken. Raises
    InputError, which names every place looked at, where there is none, for a folder without config.json, and for random
    weights of a vocabulary that cannot spell a prompt: fewer than 256 tokens, one for each byte, and no tokenizer.json.
    """
    if isinstance(source, FolderSource):
        return _folder(source.path, places_of(source.path, folders))
    if isinstance(source, RandomSource):
        text = source.config
        what = "a model's config.json"
    else:
        text = source.path
        what = "a GGUF file"
    places = places_of(text, folders)
    path = next((place for place in places if os.path.isfile(place)), None)
    if path is None:
        folder = next((place for place in places if os.path.isdir(place)), None)
        fault = f"none at {' and '.join(map(str, places))}"
        if folder:
            fault = f"a folder at {folder}: give the file in it"
        raise InputError(f"expected {what}; found {fault}{_hint(text, hub=False)}")
    if isinstance(source, RandomSource):
        _check_random(path)
    return path


def _folder(source: str, places: Sequence[Path]) -> Path:
    for place in places:  # os.path, not Path: false, not an error, for a name that no file can have
        if os.path.isdir(place):
            if not os.path.isfile(place / "config.json"):
                raise InputError(
                    f"expected a checkpoint folder with a config.json; found none in {place}{_hint_of_gguf(place)}"
                )
            return place
    if file := next((place for place in places if os.path.exists(place)), None):
        raise InputError(f"expected a folder; found a file at {file}: give the folder that holds it")
    raise InputError(f"expected a checkpoint folder; found none at {' and '.join(map(str, places))}{_hint(source)}")


def _check_random(path: Path) -> None:
    value = _read_object(path)
    if value.get(KEY) is not None:
        raise InputError(f"expected a model in floating point in {path}, as random weights are; found {KEY}")
    vocabulary = model_config.setting(value, ("vocab_size",))
    if not path.with_name("tokenizer.json").is_file() and vocabulary is not None and vocabulary < BYTES:
        raise InputError(
            f"expected a vocab_size of {BYTES} or more in {path}, a token for each byte, or a "
            f"tokenizer.json next to it; found {vocabulary}"
        )


def _hint(path: str, hub: bool = True) -> str:
    """Return what to write instead of a mistaken path, or "". hub: whether a model's name is a source here."""
    if hub and (url := _HUB_URL.fullmatch(path)):
        repository = url[1]
        if url[2]:
            repository += f"@{url[2]}"
        return f"; for a model on the hub write hf:{repository}"
    if _URL.match(path):
        return (
            "; nothing is fetched by URL: download it and give its path, or write hf:org/name@revision for a model on"
            " the hub"
        )
    if path.startswith("~") or "$" in path:
        return (
            "; ~ and variables are not expanded: write the path out, such as"
            f" {os.path.expandvars(os.path.expanduser(path))}"
        )
    if "\\" in path:
        return "; write the path with /"
    if hub and _ORG_AND_NAME.fullmatch(path):
        return f"; for a model on the hub write hf:{path}"
    return ""


def _hint_of_gguf(folder: Path) -> str:
    """Return what to write instead of a folder that holds GGUF files."""
    for name in sorted(os.listdir(folder)):
        if name.endswith(gguf_file.SUFFIX):
            return f"; for the GGUF file in it write {folder / name}"
    return ""


def places_of(path: str, folders: Sequence[str | os.PathLike] | None) -> list[Path]:
    """Return where a relative path is looked up, in order. folders: default `source_folders()`."""
    if folders is None:
        folders = source_folders()
    bases = [Path(folder).absolute() for folder in folders]
    # dict.fromkeys: started in the repository, both places are one; an absolute path ignores the base.
    return list(dict.fromkeys(Path(os.path.normpath(base / path)) for base in bases))


@dataclass(frozen=True)
class CheckpointShape:
    """The facts of a model that the config is compared with. None: its files do not say.

    limited_by: the key that says max_position_embeddings. packing: of weights that stay quantised. num_parameters: an
    estimate. linear_rows: {key that says it: numbers of a row of linear layers}. num_heads: of queries, and of keys.
    """

    num_hidden_layers: int
    max_position_embeddings: int | None
    limited_by: str = "max_position_embeddings"
    packing: Packing | None = None
    num_parameters: int | None = None
    linear_rows: Mapping[str, int] = field(default_factory=dict, compare=False)
    num_heads: tuple[Any, ...] = field(default=(None, None), compare=False)


def num_parameters(config: Mapping[str, Any], depth: int) -> int | None:
    """Estimate the number of parameters of a config.json; None without hidden_size and vocab_size.

    Attention has 4 squares of the hidden size a layer where the config has no heads, or they share a latent; an MLP 8
    where the config has no size for it; each expert is an MLP. Embedding and head are one unless it unties them.
    """

    def size(*keys: str) -> int:
        value = model_config.setting(config, keys)
        return value if type(value) is int else 0

    hidden = size(*model_config.HIDDEN_KEYS)
    vocabulary = size("vocab_size")
    if not hidden or not vocabulary:
        return None
    attention = 4 * hidden * hidden
    heads = size("num_attention_heads")
    if heads and not size("kv_lora_rank"):
        head_dim = size("head_dim") or hidden // heads
        attention = 2 * hidden * head_dim * (heads + (size("num_key_value_heads") or heads))
    mlp = 3 * hidden * size("intermediate_size") or 8 * hidden * hidden
    expert = 3 * hidden * size("moe_intermediate_size") or mlp
    experts = size(*_NUM_EXPERTS)
    of_experts = expert * (experts + size("n_shared_experts")) if experts > 1 else mlp
    dense_layers = min(size("first_k_dense_replace"), depth)
    tables = 1 + (model_config.ties_head(config) is False)
    return depth * attention + dense_layers * mlp + (depth - dense_layers) * of_experts + tables * vocabulary * hidden


def read_shape(path: Path) -> CheckpointShape:
    """Read a model's `config.json`, or that of a checkpoint folder, or the header of a GGUF file.

    Raises InputError when it is not JSON or GGUF, gives no depth, or has a value that no model can have.
    """
    if path.suffix == gguf_file.SUFFIX:
        return _gguf_shape(path)
    if path.is_dir():
        path = path / "config.json"
    value = _read_object(path)
    depth, _ = model_config.depth(value)
    if depth is None:
        raise InputError(f"expected num_hidden_layers in {path}; found none")
    packing = packing_of(value)
    # Weights that are dequantised when they are read can take any precision and group size.
    if packing is not None and not packing.stays:
        packing = None
    # One graph computes positions correctly only up to the first chunk, or to longrope's first length.
    limits: list[tuple[int, str]] = []
    for part in model_config.parts(value):
        limits += model_config.first_chunk(part)
    longrope_length = _longrope_length(value)
    if longrope_length is not None:
        reason = "original_max_position_embeddings: beyond it longrope changes the keys of all positions"
        limits.append((longrope_length, reason))
    positions = model_config.setting(value, model_config.POSITION_KEYS)
    limited_by = "max_position_embeddings"
    if limits and (positions is None or min(limits)[0] < positions):
        positions, limited_by = min(limits)
    parameters = num_parameters(value, depth)
    heads = tuple(model_config.setting(value, (key,)) for key in ("num_attention_heads", "num_key_value_heads"))
    rows = model_config.linear_rows(value)
    return CheckpointShape(depth, positions, limited_by, packing, parameters, rows, heads)


def _gguf_shape(path: Path) -> CheckpointShape:
    file = gguf_file.read_gguf(path, arrays=False)
    sizes: dict[str, int] = {}
    # llama.cpp writes them for every architecture.
    for name in ("block_count", "context_length", "embedding_length"):
        key = f"{file.architecture}.{name}"
        size = file.metadata.get(key)
        if type(size) is not int or size < 1:
            raise InputError(f"expected {key}, a positive integer, in {path}; found {size}")
        sizes[name] = size
    limit = f"{file.architecture}.context_length"
    parameters = sum(math.prod(tensor.shape) for tensor in file.tensors)
    rows = {f"{file.architecture}.embedding_length": sizes["embedding_length"]}
    heads = tuple(
        file.metadata.get(f"{file.architecture}.attention.{name}") for name in ("head_count", "head_count_kv")
    )
    return CheckpointShape(sizes["block_count"], sizes["context_length"], limit, None, parameters, rows, heads)


def _longrope_length(value: dict[str, Any]) -> int | None:
    """Return how many positions a `longrope` RoPE computes with its first frequencies; None for other types of RoPE.

    Beyond them the frequencies of all positions change, also of keys that a KV cache holds already.
    """
    for part in model_config.parts(value):
        rope = part.get("rope_parameters") or part.get("rope_scaling")
        if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) in _LONGROPE:
            # It takes precedence over the rope's own settings, as in transformers.
            values = (place.get("original_max_position_embeddings") for place in (part, rope))
            return next((length for length in values if length is not None), None)
    return None


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a model's `config.json`. Raises InputError for a value that no model can have."""
    try:
        value = model_config.parse_json(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"expected JSON in {path}; found {error}") from None
    except OSError as error:
        raise InputError(f"expected a readable file at {path}; found {error.strerror}") from None
    if not isinstance(value, dict):
        raise InputError(f"expected a JSON object in {path}; found {type(value).__name__}")
    if invalid := model_config.first_error(value):
        raise InputError(f"expected {invalid.expected} as {invalid.where} in {path}; found {repr(invalid.actual)[:60]}")
    return value
