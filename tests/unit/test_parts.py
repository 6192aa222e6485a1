"""What a data directory must be before a member opens it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from raftmeta.config import InitialMember, PeerConfig, ServerConfig
from raftmeta.core.errors import RaftmetaError
from raftmeta.durable import OsDisk, write_file
from raftmeta.log.faults import HardStateCorrupt, JournalCorrupt, WrongCluster
from raftmeta.log.records import DATA_START, RECORD_HEAD_BYTES
from raftmeta.parts import accept_loss, open_parts


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


def of_three(data_dir: Path, names: str = "abc") -> ServerConfig:
    address, url = "127.0.0.1:1", "http://127.0.0.1:1"
    return ServerConfig(
        member_id="a",
        zone="a",
        cluster_id="c",
        data_dir=data_dir,
        peer=PeerConfig(listen="127.0.0.1:0", plain=True),
        members=tuple(InitialMember(id=name, zone=name, peer_address=address, api_url=url) for name in names),
    )


@pytest.mark.parametrize("gone", [("journal",), ("journal", "snapshots")])
def test_a_directory_that_lost_its_journal_is_refused_and_forms_no_second_cluster(tmp_path: Path, gone: tuple[str, ...]) -> None:
    open_parts(ServerConfig.development(tmp_path), OsDisk()).journal.close()
    for name in gone:
        shutil.rmtree(tmp_path / name)
    with pytest.raises(HardStateCorrupt, match="since this member has started before"):
        open_parts(ServerConfig.development(tmp_path), OsDisk())
    assert not (tmp_path / "journal").exists()


def test_a_first_start_that_was_cut_off_before_its_journal_goes_on(tmp_path: Path) -> None:
    first = open_parts(ServerConfig.development(tmp_path), OsDisk())
    first.journal.close()
    identity = (tmp_path / "identity").read_bytes()
    before = identity.replace(b'"began":true', b'"began":false')
    assert before != identity
    write_file(OsDisk(), tmp_path / "identity", before[: before.index(b"}") + 1])
    shutil.rmtree(tmp_path / "journal")
    again = open_parts(ServerConfig.development(tmp_path), OsDisk())
    assert again.identity == first.identity and again.recovered.bootstrap
    again.journal.close()


def test_a_member_of_several_begins_without_a_vote_and_one_alone_with_it(tmp_path: Path) -> None:
    for config, joins in ((of_three(tmp_path / "three"), True), (ServerConfig.development(tmp_path / "one"), False)):
        config.data_dir.mkdir()
        parts = open_parts(config, OsDisk())
        assert parts.recovered.joining is joins
        parts.journal.close()


def test_a_member_of_several_gives_up_no_damaged_records_and_is_told_what_helps(tmp_path: Path) -> None:
    open_parts(of_three(tmp_path), OsDisk()).journal.close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RaftmetaError, match=r"for a single member and a is one of several: start it without the option") as refused:
        accept_loss(of_three(tmp_path), OsDisk(), 6)
    assert refused.value.code == "bad_field"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_only_member_of_a_cluster_keeps_its_damaged_files_in_place_and_may_give_them_up(tmp_path: Path) -> None:
    """It has a peer port, but nobody from whom to take them."""
    parts = open_parts(of_three(tmp_path, "a"), OsDisk())
    parts.journal.set_hard_state(1, "a")
    for index in (1, 2):
        parts.journal.append(index, 1, b"\x01")
    parts.journal.close()
    segment = next((tmp_path / "journal").glob("segment-*"))
    damaged = bytearray(segment.read_bytes())
    damaged[DATA_START + RECORD_HEAD_BYTES + 1] ^= 1
    segment.write_bytes(damaged)
    with pytest.raises(JournalCorrupt, match="record 2 cannot be read"):
        open_parts(of_three(tmp_path, "a"), OsDisk())
    assert segment.read_bytes() == damaged
    assert accept_loss(of_three(tmp_path, "a"), OsDisk(), 2) == (2, 2)
    parts = open_parts(of_three(tmp_path, "a"), OsDisk())
    assert parts.journal.last_index == 1
    parts.journal.close()


def test_the_snapshots_of_another_cluster_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        parts = open_parts(ServerConfig.development(tmp_path / name), OsDisk())
        parts.store.write(1, 0, b"\x91\x90", [b"state"])
        parts.journal.close()
    shutil.rmtree(tmp_path / "one/snapshots")
    shutil.copytree(tmp_path / "two/snapshots", tmp_path / "one/snapshots")
    with pytest.raises(WrongCluster):
        open_parts(ServerConfig.development(tmp_path / "one"), OsDisk())
