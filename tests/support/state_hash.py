"""The state hash made anew from the maps of a state, in whatever order they have: what the incremental one must always equal."""

from __future__ import annotations

from collections.abc import Iterator

from raftmeta.core import state as st
from raftmeta.core.state import State, encode_record, leaf


def recompute_hash(state: State) -> bytes:
    """The state hash from the records alone; equal to `state_hash` unless memory or code is at fault."""
    total = leaf(st.SCALARS, "", encode_record(state.scalars))
    total += sum(leaf(kind, key, record) for kind, key, record in _records(state))
    total += sum(st.entry_leaf(entry) for entry in state.catalog.values())
    return (total & st.MODULUS_MASK).to_bytes(32, "big")


def _records(state: State) -> Iterator[tuple[bytes, str, bytes]]:
    """Every record but the models as it enters the hash, in any order: a sum does not mind."""
    tables = (
        (st.DEPLOYMENT, state.deployments),
        (st.ROLLOUT, state.rollouts),
        (st.VERDICT, state.verdicts),
        (st.PAST, state.past_verdicts),
        (st.EVIDENCE, state.evidence),
    )
    for kind, records in tables:
        for key, record in records.items():
            yield kind, key, encode_record(record)
    for key, version in state.versions.items():
        yield st.VERSION, key, st.version_image(encode_record(version), state.manifests[key])
    for key, outcome in state.outcomes.items():
        yield st.OUTCOME, key, outcome
