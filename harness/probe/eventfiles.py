"""TensorBoard event files: where a file of length-framed records stops making sense. Reads headers only, seeks over the rest.

A record is: length (uint64), its checksum (uint32), the bytes, their checksum (uint32). A writer that was killed leaves half of one.
"""

from __future__ import annotations

import os
import re
import struct

MAX_RECORDS = 20_000  # about 20 ms; a longer file is judged by its head, and called whole
_NAME = re.compile(r"events\.out\.tfevents\.\d+\.(?P<host>.+)\.(?P<pid>\d+)\.\d+")


def is_event_file(path: str) -> bool:
    return "events.out.tfevents." in os.path.basename(path)


def torn_at(path: str) -> int:
    """Offset of the first record that is cut off; -1: the file is whole, empty or not of this kind."""
    with open(path, "rb") as f:
        size, at = os.fstat(f.fileno()).st_size, 0
        for _ in range(MAX_RECORDS):
            if at >= size:
                return -1
            head = f.read(12)
            if len(head) < 12:
                return at
            end = at + 16 + int(struct.unpack_from("<Q", head)[0])
            if end > size:
                return at
            f.seek(end)
            at = end
    return -1


def writer_lives(path: str) -> bool:
    """Whether the process that the file is named after still runs on this host: its tail may be on its way."""
    found = _NAME.search(os.path.basename(path))
    return found is not None and found["host"] == os.uname().nodename and os.path.exists(f"/proc/{found['pid']}")
