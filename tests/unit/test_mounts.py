"""Which file system a folder lies on, from a mountinfo of our own."""

from __future__ import annotations

from pathlib import Path

from harness.mounts import file_system_of

MOUNTINFO = r"""22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:25 / /home rw shared:1 - nfs4 filer:/home rw
31 30 0:26 / /home/me/my\040scratch rw - tmpfs tmpfs rw
32 22 0:27 / /data rw - autofs systemd-1 rw
33 32 0:28 / /data rw - lustre mds:/data rw
garbage - """


def test_the_longest_mount_above_a_folder_counts_and_the_later_one_of_two(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_text(MOUNTINFO)
    places = ("/no/such/x", "/home/me", "/homer", "/home/me/my scratch/run", "/data/me")
    assert [file_system_of(Path(place), tmp_path) for place in places] == ["ext4", "nfs4", "ext4", "tmpfs", "lustre"]


def test_nothing_is_known_where_there_is_no_table(tmp_path: Path) -> None:
    assert file_system_of(tmp_path, tmp_path) == ""
