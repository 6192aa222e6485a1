"""How an encoder directory turns token states into one embedding, read from the files of the sentence-transformers layout. Pure but reads.

`modules.json` lists the modules; we know Transformer, Pooling and Normalize, in this order. Anything else would change the answers, so it
is refused rather than left out. Without `modules.json` the embedding is the mean over the attended tokens, not normalized.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from node_agent.engine.port import EngineFault
from raftmeta import strict_json
from raftmeta.core.errors import RaftmetaError

MAX_JSON_BYTES = 1 << 20
POOLINGS = ("mean", "cls", "max", "mean_sqrt_len")
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
}


class SentenceConfig(NamedTuple):
    pooling: str = "mean"
    normalize: bool = False
    max_tokens: int | None = None  # longer texts are cut; None: what the tokenizer says


def read(directory: Path) -> SentenceConfig:
    """Raises EngineFault not_bindable for files that cannot be read or ask for something unknown."""
    modules = _load(directory / "modules.json")
    config = SentenceConfig(max_tokens=_max_tokens(directory))
    if modules is None:
        return config
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise _refused(directory / "modules.json", "a list of objects", type(modules).__name__)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"], ["Transformer"]):
        raise _refused(directory / "modules.json", "Transformer, Pooling and perhaps Normalize", ", ".join(kinds))
    pooling = "mean"
    if len(kinds) > 1:
        path = directory / str(modules[1].get("path", "")) / "config.json"
        if not path.resolve().is_relative_to(directory.resolve()):
            raise _refused(directory / "modules.json", "a path inside the version", str(modules[1].get("path")))
        pooling = _pooling(path)
    return config._replace(pooling=pooling, normalize="Normalize" in kinds)


def _pooling(path: Path) -> str:
    found = _load(path)
    if not isinstance(found, dict):
        raise _refused(path, "a JSON object", "no file" if found is None else type(found).__name__)
    named = found.get("pooling_mode")
    if isinstance(named, str):
        modes = [named]
    else:
        modes = [_FLAGS.get(str(key), str(key)) for key, value in found.items() if key.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise _refused(path, f"one of {', '.join(POOLINGS)}", ", ".join(modes) or "none")
    return modes[0]


def _max_tokens(directory: Path) -> int | None:
    path = directory / "sentence_bert_config.json"
    found = _load(path)
    value = found.get("max_seq_length") if isinstance(found, dict) else None
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise _refused(path, "max_seq_length of at least 1", repr(value))
    return value


def _load(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return strict_json.loads(file.read(MAX_JSON_BYTES + 1), MAX_JSON_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, RaftmetaError) as cause:
        raise _refused(path, "readable JSON", str(cause)) from cause


def _refused(path: Path, expected: str, found: str) -> EngineFault:
    return EngineFault("not_bindable", f"{path.name}: expected {expected}, found {found}")
