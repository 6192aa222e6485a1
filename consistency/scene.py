"""Everything that the rules of a check look at, and the figures that follow from it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from consistency.findings import Answer, Finding, Limits, NodeSummary, Target

if TYPE_CHECKING:
    from consistency.entries import Words

    Blocks = Mapping[tuple[str, str], Words]  # (node, tensor) -> block checks as the node gave them


@dataclass(frozen=True)
class Scene:
    target: Target
    answers: Sequence[Answer]
    blocks: Blocks = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    def finding(
        self, code: str, node: str, expected: object, found: object, *, tensor: str = "", block: int = -1, detail: str = ""
    ) -> Finding:
        target = self.target
        return Finding(code, target.model, target.deployment, node, str(expected), str(found), tensor, block, detail)

    def on_version(self) -> Iterator[Answer]:
        """Answers about the version that was decided; others have a finding of their own, and differ throughout."""
        for answer in self.answers:
            if answer.vector is not None and answer.vector.checksum == self.target.checksum:
                yield answer

    def seen(self, side: str) -> int:
        """Nodes of a side that answered."""
        return sum(answer.vector is not None for answer in self.answers if answer.place.side == side)

    # Figures.

    def ratio(self, blocked: bool) -> float | None:
        """Share of tensors that differ somewhere. None when nobody's are known, or some root differs and its tensors were not told."""
        seen = [(answer.vector, answer.difference) for answer in self.answers if answer.vector is not None]
        unknown = any(difference is None and given.vector_root != self.target.vector_root for given, difference in seen)
        if blocked or unknown or not seen or not self.target.tensor_count:
            return None
        return self.tensors_different() / self.target.tensor_count

    def tensors_different(self) -> int:
        """Tensors of the manifest that some node has otherwise or not at all, and those that no manifest names."""
        bits, extra = 0, 0
        for answer in self.answers:
            if answer.difference is not None:
                bits |= answer.difference.bits
                extra = max(extra, answer.difference.extra_total)
        return bits.bit_count() + extra

    def models(self, side: str) -> int | None:
        counts = [answer.vector.active_models for answer in self.answers if answer.place.side == side and answer.vector is not None]
        return min(counts, default=None)

    def mean_lag(self, side: str) -> float | None:
        known = [lag for answer in self.answers if answer.place.side == side and (lag := self.lag(answer)) is not None]
        return sum(known) / len(known) if known else None

    def lag(self, answer: Answer) -> float | None:
        """The node's own figure in ms; after a restart it has none, and what it attested counts."""
        if answer.vector is None:
            return None
        if answer.vector.lag_ms >= 0:
            return answer.vector.lag_ms
        attested = self.target.attested_lags.get(answer.place.node, -1)
        return float(attested) if attested >= 0 else None

    def oldest_proof_ms(self) -> int | None:
        return max((answer.vector.age_ms + answer.since_ms for answer in self.answers if answer.vector is not None), default=None)

    def oldest_answer_ms(self) -> int | None:
        return max((answer.since_ms for answer in self.answers if answer.vector is not None), default=None)

    def summary(self, answer: Answer) -> NodeSummary:
        place, given, lag = answer.place, answer.vector, self.lag(answer)
        if given is None:
            return NodeSummary(place.node, place.side, place.zone, False, code=answer.code, detail=answer.detail)
        return NodeSummary(
            place.node,
            place.side,
            place.zone,
            True,
            version=given.version,
            slot=given.slot,
            epoch=given.epoch,
            boot_id=given.boot_id,
            vector_root=given.vector_root,
            equal_to_manifest=given.vector_root == self.target.vector_root if self.target.vector_root else None,
            tensors_different=0 if answer.difference is None else answer.difference.total,
            active_models=given.active_models,
            lag_ms=-1.0 if lag is None else lag,
            code=answer.code,
            detail=answer.detail,
            age_ms=given.age_ms + answer.since_ms,
            sha256_equal=None if answer.digested is None else answer.digested.wrong_total == 0,
        )
