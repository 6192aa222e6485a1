"""The examples of the document: one small model on its way through the system, the same names and the same bytes everywhere.

Each body can be sent as it stands to a member that holds what it names, in the order publish, declare, activate, attest; a test does it. So
the digests are those of the manifest, and the rollout's id is the one that follows from `ROLLOUT_KEY`.
"""

from __future__ import annotations

from typing import Any

_TENSOR = "39c5b7f0f5cf2e3b1f0dd4cf0ca41c3f24f5ce2b4c02d3b1a6e1f2d3c4b5a697"
_ENTRY = "a41f6bd37a4b8f3f31dd0f1c2b3a495867768594a3b2c1d0e0f1a2b3c4d5e6f7"
_FILE = "5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"
_CONFIG = "1d2f3a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f607"
_STATE = "9b74c9897bac770ffc029102a200c5de7a1f2e3d4c5b6a798897a6b5c4d3e2f1"
CHECKSUM = "28d888d11c5f570df32e43a03cad23d03bd3d5b3c049d43ba5ec32a1befc1695"
VECTOR_ROOT = "9c83f4b9dbfd8a624f6a4fd8796c1b00497d069a23ecc992f8f3f0de9db9dd1b"
ROLLOUT_KEY = "1764453610000-5d1c2a90b7e64f31"  # idempotency key of the activation
ROLLOUT_ID = "r-255567b8d3fdb7c3"
PATH = {"model": "sentence-encoder", "label": "1.4.0", "deployment": "search", "rollout": ROLLOUT_ID, "node": "gpu-a1"}

MANIFEST: dict[str, Any] = {
    "format": "raftmeta-manifest-1",
    "engine": "hf",
    "files": [
        {"name": "config.json", "size_bytes": 612, "sha256": _CONFIG, "role": "config"},
        {"name": "model.safetensors", "size_bytes": 4192, "sha256": _FILE, "role": "weights"},
    ],
    "tensors": [
        {
            "name": "encoder.weight",
            "dtype": "F32",
            "shape": [32, 32],
            "file": "model.safetensors",
            "begin": 96,
            "end": 4192,
            "sha256": _TENSOR,
            "entry": _ENTRY,
        }
    ],
    "unbound": [],
    "vector_root": VECTOR_ROOT,
    "sources": ["https://models.example/sentence-encoder/1.4.0/"],
}
MODEL = {"name": "sentence-encoder", "last_number": 7, "version_count": 5, "created_revision": 3, "created_ms": 1764450000000}
VERSION: dict[str, Any] = {
    "model": "sentence-encoder",
    "label": "1.4.0",
    "number": 7,
    "checksum": CHECKSUM,
    "config_digest": "ef3180d8bfb11a0fabfc1e20dd081f07b4f43280b0c70be945b163e57c3db3d6",
    "weights_digest": "2056c9f8d61e8f88e4fde4c9d1f899c91c45e64c0031598ea918188fb3ba8bf2",
    "vector_root": VECTOR_ROOT,
    "manifest_digest": "cd34927bdbeb2db9492dd73ef1f26cf82a061344bb9eb0b046b8c4a4ffe163fb",
    "size_bytes": 4804,
    "weights_bytes": 4096,
    "file_count": 2,
    "tensor_count": 1,
    "principal": "ci",
    "published_revision": 41,
    "published_ms": 1764453600000,
}
DEPLOYMENT_BODY = {
    "model": "sentence-encoder",
    "primary": {"zone": "zone-a", "nodes": ["gpu-a1", "gpu-a2"]},
    "standby": {"zone": "zone-b", "nodes": ["gpu-b1", "gpu-b2"]},
    "policy": {"prepare_timeout_ms": 3600000, "sync_timeout_ms": 600000, "drain_timeout_ms": 60000, "drain_overdue": "wait"},
}
DEPLOYMENT = {
    "name": "search",
    **DEPLOYMENT_BODY,
    "version": "1.3.2",
    "previous": "1.3.1",
    "rollout_id": ROLLOUT_ID,
    "order_revision": 33,
    "declared_revision": 5,
    "activated_revision": 35,
    "activated_ms": 1764451200000,
    "serving_side": "primary",
    "failover": None,
    "serving": {**VERSION, "label": "1.3.2", "number": 6, "published_revision": 30},
    "phase": "syncing",
    "target": "1.4.0",
    "waiting_for": ["gpu-a2", "gpu-b1", "gpu-b2"],
}
FAILOVER_PREVIEW = {
    "deployment": "search",
    "serving_side": "primary",
    "to": "standby",
    "version": "1.3.2",
    "allowed": False,
    "allowed_with_force": False,
    "reasons": [
        {"code": "rollout_running", "detail": f"rollout {ROLLOUT_ID} to '1.4.0' is syncing", "nodes": [], "yields": False},
        {"code": "node_silent", "detail": "gpu-b2: sent no heartbeat", "nodes": ["gpu-b2"], "yields": False},
    ],
}
DECLARED = {**DEPLOYMENT, "phase": "idle", "target": "1.3.2", "waiting_for": []}
SERVED = {"version": "1.3.2", "rollout_id": "r-77aa01c2d3e4f506", "since_ms": 1764451100000, "until_ms": None}
COUNTERS = {
    "bytes_total": 4096,
    "bytes_fetched": 1024,
    "bytes_read": 0,
    "bytes_from_active": 3072,
    "bytes_kept": 0,
    "tensors_changed": 1,
    "switch_call_us": 0,
    "lag_ms": -1,
}
ATTEST_BODY = {
    "rollout_id": ROLLOUT_ID,
    "side": "primary",
    "stage": "ready",
    "checksum": CHECKSUM,
    "vector_root": VECTOR_ROOT,
    "boot_id": "5e7d0f6c-0f3b-4f67-9f1e-2c1d8a4b7e60",
    "counters": COUNTERS,
}
ROLLOUT = {
    "id": ROLLOUT_ID,
    "deployment": "search",
    "kind": "activate",
    "model": "sentence-encoder",
    "from_version": "1.3.2",
    "to_version": "1.4.0",
    "checksum": CHECKSUM,
    "vector_root": VECTOR_ROOT,
    "phase": "syncing",
    "status": "running",
    "attestations": [
        {
            "node": "gpu-a1",
            "side": "primary",
            "stage": "ready",
            "checksum": CHECKSUM,
            "vector_root": VECTOR_ROOT,
            "boot_id": ATTEST_BODY["boot_id"],
            "counters": COUNTERS,
            "code": "",
            "detail": "",
            "revision": 47,
            "attested_ms": 1764453660000,
        }
    ],
    "failure": None,
    "principal": "on-call",
    "started_revision": 42,
    "started_ms": 1764453610000,
    "phase_revision": 46,
    "phase_ms": 1764453640000,
    "ended_ms": 0,
    "switched_revision": 0,
    "switched_ms": 0,
}
HEARTBEAT_BODY = {
    "node": "gpu-a1",
    "zone": "zone-a",
    "boot_id": ATTEST_BODY["boot_id"],
    "url": "http://gpu-a1.example:8500",
    "slots": [{"deployment": "search", "slot": "a", "version": "1.3.2", "checksum": CHECKSUM, "state": "verified"}],
    "deployments": {
        "search": {
            "version": "1.3.2", "checksum": CHECKSUM, "vector_root": VECTOR_ROOT, "ready": True, "lag_ms": 84,
            "why": "pinned: until the quarter is closed",
        },
    },
}  # fmt: skip
EVIDENCE_BODY = {
    "deployment": "search",
    "generation": 0,
    "order_revision": 0,
    "boot_id": ATTEST_BODY["boot_id"],
    "told_ms": 86400250,
    "version": "1.4.0",
    "checksum": CHECKSUM,
    "vector_root": VECTOR_ROOT,
    "vector_from": "memory",
    "derived_digest": _STATE,
    "config_digest": VERSION["config_digest"],
    "tokenizer_digest": _ENTRY,
    "verified_age_ms": 1200,
}
SAID = {**EVIDENCE_BODY, "finding": "", "revision": 58, "recorded_ms": 1764453960000, "age_ms": 3100, "verified_at_ms": 1764453958800}
del SAID["deployment"]
EVIDENCE = {
    "deployment": "search",
    "model": "sentence-encoder",
    "version": "1.4.0",
    "checksum": CHECKSUM,
    "vector_root": VECTOR_ROOT,
    "generation": 0,
    "order_revision": 52,
    "all_serve_decided": False,
    "nodes": [
        {
            "node": "gpu-a1",
            "side": "primary",
            "zone": "zone-a",
            "standing": "current",
            "heard_age_ms": 412,
            "serves_decided": True,
            "knows_order": True,
            "evidence": {**SAID, "order_revision": 52},
        },
        {
            "node": "gpu-a2",
            "side": "primary",
            "zone": "zone-a",
            "standing": "silent",
            "heard_age_ms": None,
            "serves_decided": False,
            "knows_order": False,
            "evidence": None,
        },
    ],
}
VERDICT_BODY = {
    "deployment": "search",
    "verdict": "consistent",
    "report": {"mismatch_ratio": 0.0, "lag_ms_primary": 84, "lag_ms_standby": 91, "findings": [], "findings_total": 0},
    "basis": {"generation": 0, "order_revision": 13, "version": "1.3.2", "started_revision": 25, "node_count": 4, "age_ms": 840},
}
VERDICT = {**VERDICT_BODY, "summary": "0 findings", "principal": "checker", "revision": 52, "recorded_ms": 1764453900000}
CLUSTER = {
    "member_id": "m1",
    "cluster_id": "3f9a",
    "role": "leader",
    "leader_id": "m1",
    "term": 4,
    "last_index": 61,
    "commit_index": 61,
    "applied_index": 61,
    "applied_revision": 52,
    "members": [
        {
            "id": "m1",
            "zone": "zone-a",
            "peer_address": "10.0.0.1:7401",
            "api_url": "https://10.0.0.1:7400",
            "role": "leader",
            "match_index": 61,
            "feature_level": 2,
        }
    ],
    "journal_bytes": 81920,
    "snapshot_index": 0,
    "sync_ms": 0.41,
    "clock_offset_ms": 3,
    "fault": "",
    "caught_up": True,
    "generation": 1,
    "feature_level": 2,
    "state_hash": _STATE,
    "revision": 52,
}
