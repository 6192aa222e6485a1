"""Which tensors and blocks differ: what is asked of the nodes whose root is not the manifest's, and what that shows. Pure.

A node is not believed where the manifest can tell: its entries must add up to its root, block checks must hash to an entry. Entries that
add up to a root describe every node with that root, so they are asked for once. What is kept of them is in what they differ: of a fleet in
which every node holds something else, the memory that a check takes is bounded, and the counts are whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from consistency.entries import BLOCK_BYTES, entry_of, root
from consistency.findings import Answer, Difference, Finding, Target, TensorSpec
from consistency.scene import Scene
from raftmeta.core.errors import RaftmetaError

if TYPE_CHECKING:
    from consistency.entries import Words

MAX_LISTED = 1_024  # differences of one node by name; all are counted
MAX_BLOCKS_NAMED = 8  # of one tensor on one node
MAX_TENSORS_LOCATED = 16  # of one node: for these the block checks are fetched
MAX_LOCATIONS = 512  # of one check
PUBLISHED = ""  # in the place of a node: block checks that hash to the manifest's entry
MAX_ROOTS = 64  # different wrong roots of which the entries are asked for


def difference(tensors: Mapping[str, TensorSpec], entries: Mapping[str, str]) -> Difference:
    """Of a node's entries from the whole manifest's."""
    changed: list[tuple[str, str]] = []
    missing: list[str] = []
    bits = bytearray(-(-len(tensors) // 8))
    for at, name in enumerate(sorted(tensors)):
        found = entries.get(name)
        if found == tensors[name].entry:
            continue
        bits[at // 8] |= 1 << at % 8
        if found is None:
            missing.append(name)
        else:
            changed.append((name, found))
    extra = sorted(entries.keys() - tensors.keys())
    listed = tuple((name, entries[name]) for name in extra[:MAX_LISTED])
    return Difference(
        root(entries),
        tuple(changed[:MAX_LISTED]),
        tuple(missing[:MAX_LISTED]),
        listed,
        len(extra),
        int.from_bytes(bits, "little"),
    )


def named(tensors: Mapping[str, TensorSpec], answers: Sequence[Answer]) -> dict[str, TensorSpec]:
    """Those of the manifest's tensors that an answer lists; findings need no others."""
    names: set[str] = set()
    for answer in answers:
        if answer.difference is not None:
            names.update(name for name, _ in answer.difference.changed)
            names.update(answer.difference.missing)
        if answer.digested is not None:
            names.update(name for name, _ in answer.digested.wrong)
    return {name: tensors[name] for name in sorted(names)}


# What a collector has to ask next. It asks for roots first, then for this.


def needing_entries(target: Target, answers: Sequence[Answer]) -> list[list[str]]:
    """Nodes whose root is not the manifest's, those with the same root together, at most MAX_ROOTS of them."""
    if target.switching or not target.version:
        return []
    groups: dict[str, list[str]] = {}
    for answer in answers:
        given = answer.vector
        if given is not None and not given.switching and given.vector_root != target.vector_root:
            groups.setdefault(given.vector_root, []).append(given.node)
    return list(groups.values())[:MAX_ROOTS]


def needing_blocks(target: Target, answers: Sequence[Answer]) -> list[tuple[str, str]]:
    """(node, tensor) whose block checks locate the damage, beside what was published of the tensor.

    The first tensor of every node comes before the second of any, so that no node's many use up what is there for all.
    """
    changed = [
        (answer.vector.node, answer.difference.changed)
        for answer in answers
        if answer.vector is not None and answer.vector.checksum == target.checksum and answer.difference is not None
    ]
    turns = ((node, names[turn][0]) for turn in range(MAX_TENSORS_LOCATED) for node, names in changed if turn < len(names))
    return list(islice(turns, MAX_LOCATIONS))


def holder(target: Target, answers: Sequence[Answer], name: str) -> str:
    """A node that holds this tensor as the manifest says, "" if none does; best one whose whole root is the manifest's."""
    found = ""
    for answer in answers:
        if answer.vector is None:
            continue
        if answer.vector.vector_root == target.vector_root:
            return answer.vector.node
        if not found and answer.difference is not None and _holds(target, answer, name):
            found = answer.vector.node
    return found


def _holds(target: Target, answer: Answer, name: str) -> bool:
    """By the listed differences, which must be whole for that, of a node that does not contradict itself."""
    seen, given = answer.difference, answer.vector
    assert seen is not None and given is not None
    listed = len(seen.changed) + len(seen.missing) == seen.bits.bit_count() and seen.root == given.vector_root
    return listed and name not in seen.missing and all(other != name for other, _ in seen.changed)


# The rules.


def weights(scene: Scene) -> Iterator[Finding]:
    """Vectors against the manifest's, as deep as they were told."""
    for answer in scene.on_version():
        given, seen = answer.vector, answer.difference
        assert given is not None
        if seen is not None and seen.root != given.vector_root:
            detail = "the node's entries do not add up to its root: its memory changed in between, or it does not compute"
            yield scene.finding("self_contradiction", given.node, given.vector_root, seen.root, detail=detail)
        if given.vector_root == scene.target.vector_root:
            continue
        if seen is None:
            yield scene.finding("vector_root", given.node, scene.target.vector_root, given.vector_root, detail="the tensors were not told")
            continue
        yield from _tensors(scene, answer, seen)


def sha256(scene: Scene) -> Iterator[Finding]:
    """Digests of slot memory against the manifest's."""
    for answer in scene.on_version():
        assert answer.vector is not None
        if answer.digested is None:
            continue
        for name, found in answer.digested.wrong:
            yield scene.finding("sha256", answer.vector.node, scene.target.tensors[name].sha256, found, tensor=name)
        hidden = answer.digested.wrong_total - len(answer.digested.wrong)
        if hidden:
            detail = f"{hidden} further tensors"
            yield scene.finding("sha256", answer.vector.node, "the manifest's digests", "others", detail=detail)


def uncounted(scene: Scene) -> int:
    """Differences for which one finding stands that says how many they are."""
    beyond = 0
    for answer in scene.on_version():
        beyond += max(0, _hidden(answer.difference) - 1)
        if answer.digested is not None:
            beyond += max(0, answer.digested.wrong_total - len(answer.digested.wrong) - 1)
    return beyond


def _hidden(seen: Difference | None) -> int:
    return 0 if seen is None else seen.total - len(seen.missing) - len(seen.extra) - len(seen.changed)


def _tensors(scene: Scene, answer: Answer, seen: Difference) -> Iterator[Finding]:
    given, specs = answer.vector, scene.target.tensors
    assert given is not None
    for name in seen.missing:
        yield scene.finding("tensor_missing", given.node, specs[name].entry, "nothing", tensor=name)
    for name, found in seen.extra:
        yield scene.finding("tensor_extra", given.node, "nothing", found, tensor=name)
    for name, found in seen.changed:
        located = list(_located(scene, given.node, name, found))
        yield from located or [scene.finding("tensor", given.node, specs[name].entry, found, tensor=name)]
    hidden = _hidden(seen)
    if hidden:
        yield scene.finding("tensor", given.node, "the manifest's entries", "others", detail=f"{hidden} further tensors")


def _located(scene: Scene, node: str, name: str, entry: str) -> Iterator[Finding]:
    """The blocks that differ from what was published; nothing when either cannot be trusted: it must hash to its entry."""
    spec = scene.target.tensors[name]
    mine, good = scene.blocks.get((node, name)), scene.blocks.get((PUBLISHED, name))
    if mine is None or good is None or hash_to(spec, mine) != entry or hash_to(spec, good) != spec.entry:
        return
    differing = (mine != good).any(axis=1).nonzero()[0].tolist()
    for block in differing[:MAX_BLOCKS_NAMED]:
        begin = block * BLOCK_BYTES
        end = min(spec.size_bytes, begin + BLOCK_BYTES)
        detail = f"bytes {begin}..{end} of the tensor; {len(differing)} of its {len(good)} blocks differ"
        yield scene.finding("block", node, _pair(good[block]), _pair(mine[block]), tensor=name, block=block, detail=detail)


def hash_to(spec: TensorSpec, checks: Words) -> str:
    """The entry that these block checks make, "" when they are too many or too few."""
    try:
        return entry_of(spec.dtype, spec.shape, spec.size_bytes, checks)
    except RaftmetaError:
        return ""


def _pair(check: Words) -> str:
    a, b = check.tolist()
    return f"{a:016x}:{b:016x}"
