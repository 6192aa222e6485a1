"""What a data directory must be before a member opens it."""

from __future__ import annotations

from pathlib import Path

import pytest

from raftmeta.config import ServerConfig
from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import OsDisk
from raftmeta.parts import open_parts


def test_a_directory_with_somebody_elses_files_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RaftmetaError, match=r"holds 'thesis\.txt' and no member") as refused:
        open_parts(ServerConfig.development(tmp_path), OsDisk())
    assert refused.value.code == "directory_refused"
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_directory_of_another_member_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_parts(ServerConfig.development(tmp_path), OsDisk()).journal.close()
    monkeypatch.setenv("RAFTMETA_MEMBER_ID", "other")
    with pytest.raises(RaftmetaError, match="belongs to member 'dev'") as refused:
        open_parts(ServerConfig.development(tmp_path), OsDisk())
    assert refused.value.code == "directory_refused"


def test_a_development_member_forms_its_cluster_once(tmp_path: Path) -> None:
    first = open_parts(ServerConfig.development(tmp_path), OsDisk())
    assert first.recovered.bootstrap and not first.recovered.joining
    first.journal.close()
    again = open_parts(ServerConfig.development(tmp_path), OsDisk())
    assert again.identity == first.identity
    again.journal.close()
