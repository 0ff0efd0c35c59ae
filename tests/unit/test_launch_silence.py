"""Which hosts do not answer, from /proc/net/tcp as a kernel wrote it while n2 of three nodes was cut off."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launch import proctable, silence

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   2: 0CAB12C6:9DB1 0DAB12C6:C3B4 01 00000060:00000000 01:0000020B 00000005     0        0 867187 2 00000000b4665a46 652 4 19 1 -1
   3: 0CAB12C6:42D7 0AAB12C6:AFFE 06 00000000:00000000 03:00000000 00000000     0        0 0 3 00000000f07d8b4b
   4: 0CAB12C6:9DB2 0DAB12C6:C3B5 01 00000010:00000000 01:0000020B 00000004     0        0 867188 2 00000000b4665a46 652 4 19 1 -1
   5: 0CAB12C6:9DB3 0EAB12C6:C3B6 01 00000010:00000000 04:0000020B 00000009     0        0 867189 2 00000000b4665a46 652 4 19 1 -1
   6: 0CAB12C6:9DB4 0FAB12C6:C3B7 01 00000010:00000000 01:0000020B 00000002     0        0 867190 2 00000000b4665a46 652 4 19 1 -1
   7: 0CAB12C6:9DB5 10AB12C6:C3B8 01 00000010:00000000 01:0000020B 00000006     0        0 999999 2 00000000b4665a46 652 4 19 1 -1
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0000000000000000FFFF00000CAB12C6:9160 0000000000000000FFFF00000BAB12C6:4E88 01 00000033:00000000 01:0000020A 00000005     0        0 867095 2 0 652 4
   1: garbage
"""


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(proctable, "socket_inodes", lambda pid: {7: ["867187", "867188", "867189", "867190", "867095"]}.get(pid, []))
    (tmp_path / "tcp").write_text(TCP)
    (tmp_path / "tcp6").write_text(TCP6)
    return [tmp_path / "tcp", tmp_path / "tcp6", tmp_path / "missing"]


@pytest.mark.skipif(sys.byteorder != "little", reason="the table was written by a little-endian kernel")
def test_who_does_not_acknowledge_is_named_once(tables: list[Path]) -> None:
    assert silence.silent_peers([7, 8], tables) == [
        {"ip": "198.18.171.11", "retransmissions": 5, "num_bytes": 0x33},
        {"ip": "198.18.171.13", "retransmissions": 5, "num_bytes": 0x70},
    ]  # not: a probe of a full window, too few repetitions, another process's socket


def test_sockets_of_others_say_nothing(tables: list[Path]) -> None:
    assert silence.silent_peers([8], tables) == []


def test_a_peer_that_does_not_read_is_not_silent() -> None:
    """Its kernel acknowledges, whatever the process does: a hung rank is no host that is cut off."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        talk = f"import socket, time; s = socket.create_connection(('127.0.0.1', {server.getsockname()[1]})); s.setblocking(False)"
        talk += "\ntry:\n    while True: s.send(b'x' * 65536)\nexcept BlockingIOError: print('full', flush=True); time.sleep(60)"
        with subprocess.Popen([sys.executable, "-c", talk], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"full\n"
            assert silence.silent_peers([process.pid]) == []
            process.kill()
