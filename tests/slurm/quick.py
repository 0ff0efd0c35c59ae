"""A job without torch, so that starting it costs little: the ranks meet at MASTER_ADDR:MASTER_PORT. Its argument says what comes then."""

import os
import socket
import sys
import time
from pathlib import Path

what, more = [*sys.argv[1:], "", ""][:2]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
until = time.monotonic() + 60


def knock() -> socket.socket:
    while True:
        try:
            return socket.create_connection(place, 60)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


if rank == 0:
    server = socket.create_server(("", place[1]))
    server.settimeout(60)
    peers = [server.accept()[0] for _ in range(world_size - 1)]
    print("all have met", flush=True)
else:
    peers = [knock()]
    print("out", rank, os.environ["LOCAL_RANK"], os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("LOADED"), flush=True)
if what == "raise" and rank == 1:
    raise ValueError("boom on rank 1")
if what == "eat" and rank == 1:
    held = [bytearray(b"x" * 50_000_000) for _ in range(200)]
if what == "sleep":
    time.sleep(float(more))
if what == "wait":
    while not Path(more).exists():
        time.sleep(0.05)
