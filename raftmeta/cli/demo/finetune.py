"""A script of its own process: `python -m raftmeta.cli.demo.finetune SRC OUT` trains v2 and v3 from v1 and says what each should answer.

v2 = v1 after a few gradient steps on its last two layers; v3 = v2 after some more on the last one. Everything else is byte for byte the
source, in the same file layout, so that the versions differ by exactly the trained tensors. OUT/reference.json holds the answers of all
three to the probes, scaled to length one. The only file of the command line that imports torch; the demo itself stays light.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported; the demo needs no network

import torch
import transformers

from raftmeta.cli.demo.sentences import PAIRS, PROBES
from raftmeta.core.safetensors import header_length, parse_header

MIN_DISTANCE = 2e-2  # between two versions' answers to any probe; twice what the demo claims
MIN_STEPS, MAX_STEPS = 4, 80
LEARNING_RATE = 5e-4
TEMPERATURE = 0.05  # of the similarities in the loss, as usual for sentence encoders
THREADS = 1  # the members and agents start meanwhile, on perhaps two cores
MAX_TOKENS = 64  # holds every sentence here

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_LAYER = re.compile(r"\.(\d+)\.")


class Encoder:
    """A sentence encoder: texts in, pooled last hidden states of length one out."""

    def __init__(self, source: Path) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
        self.module: Any = transformers.AutoModel.from_pretrained(source, local_files_only=True, dtype=torch.float32)
        self.module.eval()  # no dropout: the same steps every time
        self.pooling = pooling_of(source)

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        batch = self.tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        hidden = self.module(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        elif self.pooling == "max":
            pooled = hidden.masked_fill(mask == 0, float("-inf")).amax(1)
        else:
            pooled = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled, dim=-1)

    @torch.no_grad()
    def answers(self) -> torch.Tensor:
        """One text at a time, as the serving side computes them."""
        return torch.cat([self.encode([text]) for text in PROBES])

    def last_layers(self, count: int) -> dict[str, torch.nn.Parameter]:
        """The parameters of the `count` last numbered layers that have any; of the whole module when nothing is numbered."""
        named = {name: parameter for name, parameter in self.module.named_parameters() if parameter.is_floating_point()}
        layers = {name: int(found[1]) for name in named if (found := _LAYER.search(name))}
        wanted = sorted(set(layers.values()))[-count:]
        return {name: named[name] for name in layers if layers[name] in wanted} or named


def pooling_of(source: Path) -> str:
    """How the directory says that token states become one vector (sentence-transformers layout); the mean if it says nothing."""
    for path in sorted(source.glob("*_Pooling/config.json")):
        settings = json.loads(path.read_text("utf-8"))
        for flag, name in (("pooling_mode_cls_token", "cls"), ("pooling_mode_max_tokens", "max")):
            if settings.get(flag) is True or settings.get("pooling_mode") == name:
                return name
    return "mean"


def train(encoder: Encoder, trained: dict[str, torch.nn.Parameter], before: Sequence[torch.Tensor]) -> tuple[int, float]:
    """Pull the two sentences of a pair together and different pairs apart, until the probes' answers have moved away from `before`."""
    for parameter in encoder.module.parameters():
        parameter.requires_grad_(False)
    for parameter in trained.values():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(list(trained.values()), lr=LEARNING_RATE)
    left, right = zip(*PAIRS, strict=True)
    goal = torch.arange(len(PAIRS))
    for step in range(1, MAX_STEPS + 1):
        similarity = encoder.encode(left) @ encoder.encode(right).T / TEMPERATURE
        loss = (torch.nn.functional.cross_entropy(similarity, goal) + torch.nn.functional.cross_entropy(similarity.T, goal)) / 2
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if step >= MIN_STEPS and min(distance(encoder.answers(), answers) for answers in before) >= MIN_DISTANCE:
            return step, float(loss.detach())
    raise SystemExit(f"after {MAX_STEPS} steps the answers are still less than {MIN_DISTANCE} apart")


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Over all probes the smallest of their largest component differences."""
    return float((a - b).abs().amax(dim=-1).min())


def save(source: Path, target: Path, encoder: Encoder, trained: Sequence[str]) -> None:
    """Copy `source` and overwrite the trained tensors in place, in the dtype of the file; every other byte stays."""
    shutil.copytree(source, target, symlinks=False)
    state = encoder.module.state_dict()
    left = set(trained)
    for path in sorted(target.rglob("*.safetensors")):
        with path.open("r+b") as file:
            size = path.stat().st_size
            length = header_length(file.read(8), size)
            file.seek(0)
            for entry in parse_header(file.read(8 + length), size).tensors:
                own = next((own for own in left if entry.name == own or entry.name.endswith("." + own)), None)
                if own is None:
                    continue
                left.discard(own)
                data = state[own].to(_DTYPES[entry.dtype]).contiguous().view(torch.uint8).numpy().tobytes()
                if len(data) != entry.end - entry.begin:
                    raise SystemExit(f"{entry.name}: trained to {len(data)} bytes, the file has {entry.end - entry.begin}")
                file.seek(entry.begin)
                file.write(data)
    if left:
        raise SystemExit(f"trained tensors that no file of {source} holds: {', '.join(sorted(left)[:5])}")


def main(arguments: Sequence[str]) -> int:
    source, out = Path(arguments[0]), Path(arguments[1])
    torch.manual_seed(1)
    torch.set_num_threads(THREADS)
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    out.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(source)
    answers = {"v1": encoder.answers()}
    trainings = {}
    before = source
    for label, layers in (("v2", 2), ("v3", 1)):
        trained = encoder.last_layers(layers)
        steps, loss = train(encoder, trained, list(answers.values()))
        save(before, out / label, encoder, list(trained))
        answers[label] = encoder.answers()
        trainings[label] = {"steps": steps, "loss": round(loss, 4), "tensors": len(trained)}
        before = out / label
    reference = {
        "probes": list(PROBES),
        "answers": {label: answer.tolist() for label, answer in answers.items()},
        "trainings": trainings,
        "distance": min(distance(answers[a], answers[b]) for a, b in (("v1", "v2"), ("v2", "v3"), ("v1", "v3"))),
    }
    temporary = out / ".reference.json"
    temporary.write_text(json.dumps(reference), encoding="utf-8")
    temporary.replace(out / "reference.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
