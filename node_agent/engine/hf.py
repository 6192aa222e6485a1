"""The engine for Hugging Face encoder directories: text or token ids in, token states and an embedding out.

The module is the base model of config.json, as the publisher's check of unbound tensors takes it, bound over the slot's memory. Code that
comes with a model never runs, and nothing is asked of a network. The tokenizer is that of the version's own files. Inputs are checked
against the model's limits before torch sees them: an id beyond the vocabulary would end in an index error deep inside.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from torch import Tensor as TorchTensor

from node_agent.binding import BoundModule, SlotViews, bind
from node_agent.engine import sentence
from node_agent.engine.port import BadInput, EngineFault, Instance
from node_agent.engine.sentence import SentenceConfig
from node_agent.messages import DerivedDamage, Tensor, TensorSpec

MAX_BATCH = 256  # rows of one request
MAX_TOKENS = 65_536  # rows x length; bounds the memory of one request
MAX_TEXT_CHARS = 1 << 20  # of all texts of a request
_WARM_TEXTS = ("warm-up", "The quick brown fox jumps over the lazy dog, twice and then once more.")
_TOKENS = ("input_ids", "attention_mask", "token_type_ids")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
_LIBRARY_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, AttributeError, IndexError)


class HfEngine:
    def __init__(self) -> None:
        logging = cast(Any, transformers.utils.logging)
        logging.disable_progress_bar()
        logging.set_verbosity_error()

    def load(self, version_dir: Path, views: SlotViews, unbound: Sequence[str]) -> Instance:
        settings = sentence.read(version_dir)
        try:
            config = transformers.AutoConfig.from_pretrained(version_dir, local_files_only=True, trust_remote_code=False)
            model_class = cast(Any, transformers.AutoModel)._model_mapping[type(config)]
            tokenizer = _tokenizer(version_dir)
        except _LIBRARY_ERRORS as cause:
            raise EngineFault("not_bindable", f"config or tokenizer: {type(cause).__name__}: {cause}") from cause
        if getattr(config, "is_encoder_decoder", False):
            raise EngineFault("not_bindable", f"{config.model_type}: expected an encoder, found an encoder with a decoder")
        return HfInstance(bind(config, model_class, views, unbound), tokenizer, settings)


class HfInstance:
    def __init__(self, bound: BoundModule, tokenizer: Any, settings: SentenceConfig) -> None:
        self._bound = bound
        self._module = cast(Any, bound.module)
        self._tokenizer = tokenizer
        self._settings = settings
        self._lock = threading.Lock()  # a tokenizer may not be used by two threads: warming meets a request here
        config = self._module.config
        self._vocabulary = int(getattr(config, "vocab_size", 0))
        self._longest = _longest(config, tokenizer, settings)
        taken = inspect.signature(self._module.forward).parameters
        self._token_inputs = tuple(name for name in _TOKENS if name in taken)
        width = int(config.hidden_size)
        text = (TensorSpec("text", "BYTES", (-1,)),) if tokenizer is not None else ()
        self.inputs = (*text, *(TensorSpec(name, "INT64", (-1, -1)) for name in self._token_inputs))
        self.outputs = (TensorSpec("embedding", "FP32", (-1, width)), TensorSpec("last_hidden_state", "FP32", (-1, -1, width)))

    @property
    def derived(self) -> Mapping[str, str]:
        return {item.name: item.sha256 for item in self._bound.derived}

    def check_derived(self, name: str) -> DerivedDamage | None:
        return self._bound.check_derived(name)

    def infer(self, inputs: Sequence[Tensor], outputs: Sequence[str]) -> tuple[Tensor, ...]:
        with self._lock:
            return self._infer(inputs, outputs)

    def _infer(self, inputs: Sequence[Tensor], outputs: Sequence[str]) -> tuple[Tensor, ...]:
        known = [spec.name for spec in self.outputs]
        unknown = [name for name in outputs if name not in known]
        if unknown:
            raise BadInput(f"output {unknown[0][:200]!r} is unknown, the model gives {', '.join(known)}")
        given = {item.name: item for item in inputs}
        tokens = self._from_text(given) if "text" in given else self._from_tokens(given)
        wanted = tuple(outputs) or (("embedding",) if "text" in given else ("embedding", "last_hidden_state"))
        states, embedding = self._run(tokens)
        results = {"embedding": embedding, "last_hidden_state": states}
        return tuple(_answer(name, results[name]) for name in wanted)

    def warm(self) -> None:
        try:
            if self._tokenizer is not None:
                self.infer((Tensor("text", "BYTES", (len(_WARM_TEXTS),), _WARM_TEXTS),), ())
            else:
                length = min(8, self._longest)
                ids = np.arange(length, dtype="<i8") % max(1, self._vocabulary)
                self.infer((Tensor("input_ids", "INT64", (1, length), ids.tobytes()),), ())
        except BadInput as cause:
            raise EngineFault("warmup_failed", str(cause)) from cause
        except EngineFault as cause:
            raise EngineFault("warmup_failed", cause.detail) from cause

    def check(self) -> None:
        self._bound.check()

    def _from_text(self, given: Mapping[str, Tensor]) -> dict[str, TorchTensor]:
        item = given["text"]
        if self._tokenizer is None:
            raise BadInput("this version has no tokenizer; send input_ids")
        if len(given) > 1:
            raise BadInput("text comes alone, without token inputs")
        if not isinstance(item.data, tuple) or len(item.shape) not in (1, 2) or (len(item.shape) == 2 and item.shape[1] != 1):
            raise BadInput(f"text: expected BYTES of shape [n] or [n, 1], found {item.datatype} {list(item.shape)}")
        if len(item.data) > MAX_BATCH or sum(map(len, item.data)) > MAX_TEXT_CHARS:
            raise BadInput(f"text: the limits are {MAX_BATCH} texts and {MAX_TEXT_CHARS} characters")
        encoded = self._tokenizer(
            list(item.data), padding=True, truncation=True, max_length=self._longest, return_tensors="pt", return_token_type_ids=True
        )
        return {name: encoded[name] for name in self._token_inputs if name in encoded}

    def _from_tokens(self, given: Mapping[str, Tensor]) -> dict[str, TorchTensor]:
        strangers = sorted(set(given) - set(self._token_inputs))
        if strangers or "input_ids" not in given:
            what = f"input {strangers[0][:200]!r} is unknown" if strangers else "input_ids is missing"
            raise BadInput(f"{what}; the model takes {', '.join(spec.name for spec in self.inputs)}")
        ids = self._integers(given["input_ids"], self._vocabulary)
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name, bound in (("attention_mask", 2), ("token_type_ids", int(getattr(self._module.config, "type_vocab_size", 0) or 1))):
            if name in given:
                tokens[name] = self._integers(given[name], bound)
                if tokens[name].shape != ids.shape:
                    raise BadInput(f"{name}: expected the shape of input_ids {list(ids.shape)}, found {list(tokens[name].shape)}")
        if not bool(tokens["attention_mask"].any(dim=1).all()):
            raise BadInput("attention_mask: a row attends to nothing")
        return {name: value for name, value in tokens.items() if name in self._token_inputs}

    def _integers(self, item: Tensor, bound: int) -> TorchTensor:
        """Token inputs as INT64 [n, length] with values in [0, bound)."""
        if item.datatype not in ("INT64", "INT32") or len(item.shape) != 2 or not isinstance(item.data, bytes):
            raise BadInput(f"{item.name}: expected INT64 or INT32 of shape [n, length], found {item.datatype} {list(item.shape)}")
        rows, length = item.shape
        if rows > MAX_BATCH or length > self._longest or rows * length > MAX_TOKENS:
            raise BadInput(f"{item.name}: the limits are {MAX_BATCH} rows, {self._longest} tokens a row and {MAX_TOKENS} together")
        values = np.frombuffer(item.data, "<i8" if item.datatype == "INT64" else "<i4").astype(np.int64).reshape(item.shape)
        if values.size and (values.min() < 0 or values.max() >= bound):
            raise BadInput(f"{item.name}: values lie in [0, {bound}), found {values.min()}..{values.max()}")
        return torch.from_numpy(values)

    def _run(self, tokens: dict[str, TorchTensor]) -> tuple[TorchTensor, TorchTensor]:
        try:
            with torch.inference_mode():
                states = self._module(**tokens).last_hidden_state.float()
                mask = tokens.get("attention_mask", torch.ones(states.shape[:2]))
                embedding = pool(states, mask, self._settings)
        except _LIBRARY_ERRORS as cause:
            raise EngineFault("engine_failed", f"the module raised {type(cause).__name__}: {cause}") from cause
        if not bool(torch.isfinite(embedding).all()):
            raise EngineFault("engine_failed", "the module answered with a value that is not finite")
        return states, embedding


def pool(states: TorchTensor, mask: TorchTensor, settings: SentenceConfig) -> TorchTensor:
    """Token states [n, length, width] to embeddings [n, width]; padding does not count."""
    weights = mask.unsqueeze(-1).to(states.dtype)
    if settings.pooling == "cls":
        first = mask.argmax(dim=1)  # with padding on the left the first token is not at 0
        result = states[torch.arange(states.shape[0]), first]
    elif settings.pooling == "max":
        result = states.masked_fill(weights == 0, float("-inf")).max(dim=1).values
    else:
        count = weights.sum(dim=1).clamp(min=1e-9)
        result = (states * weights).sum(dim=1) / (count if settings.pooling == "mean" else count.sqrt())
    if settings.normalize:
        result = torch.nn.functional.normalize(result, p=2.0, dim=1)
    return result


def _answer(name: str, value: TorchTensor) -> Tensor:
    return Tensor(name, "FP32", tuple(value.shape), value.contiguous().numpy().astype("<f4", copy=False).tobytes())


def _tokenizer(version_dir: Path) -> Any:
    """The version's tokenizer, None when it has no tokenizer file."""
    if not any((version_dir / name).exists() for name in _TOKENIZER_FILES):
        return None
    tokenizer = transformers.AutoTokenizer.from_pretrained(version_dir, local_files_only=True, trust_remote_code=False)
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token  # only masked positions see it
    return tokenizer


def _longest(config: Any, tokenizer: Any, settings: SentenceConfig) -> int:
    """Tokens of one row: the least of what the positions, the tokenizer and the sentence settings allow."""
    positions = int(getattr(config, "max_position_embeddings", 0) or MAX_TOKENS)
    pad = getattr(config, "pad_token_id", None)
    if config.model_type in ("roberta", "xlm-roberta", "camembert") and pad is not None:
        positions -= pad + 1  # their positions begin after the padding id
    limits = [positions, MAX_TOKENS]
    if tokenizer is not None:
        limits.append(int(min(tokenizer.model_max_length, MAX_TOKENS)))
    if settings.max_tokens is not None:
        limits.append(settings.max_tokens)
    return max(1, min(limits))
