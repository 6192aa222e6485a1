from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from raftmeta.core import manifest as m
from raftmeta.core import probes
from raftmeta.core.probes import Probe, ProbeTensor
from tests.unit.core.test_manifest import manifest

TEXT = ProbeTensor("text", "BYTES", (2,), ("one", "two"))
ROWS = ProbeTensor("embedding", "FP32", (2, 2), struct.pack("<4f", 1, 0, 0, 1))
PROBE = Probe("two-texts", "cosine", (TEXT,), (ROWS,), padding="longest", kernel="torch cpu", threads=1)


def change(**fields: Any) -> Probe:
    return msgspec.structs.replace(PROBE, **fields)


def test_a_sound_probe_has_no_fault_and_survives_packing() -> None:
    assert list(probes.faults([PROBE])) == []
    made = manifest(probes=(PROBE,))
    assert m.faults(made) == []
    assert m.unpack(m.pack(made)) == made
    assert msgspec.json.decode(msgspec.json.encode(made), type=m.Manifest) == made


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (change(name="a/b"), "the name is outside"),
        (change(measure="vibes"), "measure 'vibes'"),
        (change(limit=-0.1), "limit -0.1"),
        (change(limit=float("nan")), "limit nan"),
        (change(kernel="x" * 257), "out of bounds"),
        (change(threads=-1), "out of bounds"),
        (change(inputs=()), "0 inputs"),
        (change(inputs=(TEXT, TEXT)), "names of their own"),
        (change(outputs=(ProbeTensor("e", "INT64", (1, 1), b"\0" * 8),)), "cosine needs floating point, found INT64"),
        (change(outputs=(ProbeTensor("e", "FP32", (1,), b"\0" * 4),)), "cosine needs rows"),
        (change(inputs=(ProbeTensor("text", "BYTES", (2,), ("one",)),)), "needs 2 texts"),
        (change(inputs=(ProbeTensor("text", "BYTES", (2,), b"ab"),)), "needs 2 texts"),
        (change(inputs=(ProbeTensor("x", "FP8", (2,), b"ab"),)), "unknown datatype"),
        (change(inputs=(ProbeTensor("x", "FP32", (2,), b"abc"),)), "needs 8 bytes"),
        (change(inputs=(ProbeTensor("x", "FP32", (-2,), b""),)), "impossible shape"),
        (change(inputs=(ProbeTensor("", "UINT8", (1,), b"a"),)), "no name"),
        (change(inputs=(ProbeTensor("x", "UINT8", (1,) * 9, b"a"),)), "impossible shape"),
    ],
)
def test_what_contradicts_itself_is_named_and_no_such_manifest_is_published(broken: Probe, fault: str) -> None:
    assert any(fault in found for found in probes.faults([broken])), list(probes.faults([broken]))
    assert any(fault in found for found in m.faults(manifest(probes=(broken,))))


def test_together_they_are_bounded_in_number_and_size() -> None:
    many = [change(name=f"p{number}") for number in range(probes.MAX_PROBES + 1)]
    assert "17 probes" in next(probes.faults(many))
    assert list(probes.faults(many[:-1])) == []
    assert "same name" in next(probes.faults([PROBE, PROBE]))
    large = change(measure="close", inputs=(ProbeTensor("x", "UINT8", (1 << 18,), b"\0" * (1 << 18)),))
    assert any("the limit is 262144" in fault for fault in probes.faults([large]))
    texts = change(inputs=(ProbeTensor("text", "BYTES", (1,), ("é" * (1 << 17),)),))
    assert any("the limit is 262144" in fault for fault in probes.faults([texts]))


@pytest.mark.parametrize(
    "other",
    [
        change(limit=0.99),
        change(name="other"),
        change(threads=2),
        change(outputs=(msgspec.structs.replace(ROWS, data=struct.pack("<4f", 1, 0, 0, 2)),)),
    ],
)
def test_the_checksum_of_a_version_binds_its_probes(other: Probe) -> None:
    assert m.config_digest(manifest(probes=(PROBE,))) != m.config_digest(manifest(probes=(other,)))


def test_a_version_without_probes_keeps_the_digest_it_had_before_there_were_any() -> None:
    without = manifest()
    assert m.config_digest(manifest(probes=(PROBE,))) != m.config_digest(without)
    assert m.config_digest(without) == "ffa92562f2edd51fd7ea9c17e6e5edfddfdafccc8bc1de0266962eb9c9529bae"
