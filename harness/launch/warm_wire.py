"""How a client and its server speak: length-prefixed JSON over a UNIX socket in a private folder, descriptors beside the first message.

client: {"argv", "cwd", "env", "session"} + stdin, stdout, stderr; then {"signal": n}...; its end of file ends the rank
server: {"pid", "ticks"}, then {"code"} as waitpid gives it
"""

from __future__ import annotations

import array
import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("<I")
ENV_SERVERS = "_HARNESS_SERVERS"  # the folder with the sockets
AGENT = "agent"


def send(peer: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    body = json.dumps(message).encode("ascii")  # surrogates of undecodable bytes survive as \\ud8.. escapes
    data = LENGTH.pack(len(body)) + body
    if descriptors:
        sent = peer.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
        data = data[sent:]
    peer.sendall(data)


def receive(peer: socket.socket, num_descriptors: int = 0) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message, or None at the end of file."""
    descriptors = array.array("i")
    space = socket.CMSG_LEN(num_descriptors * descriptors.itemsize) if num_descriptors else 0
    head, ancillary, _, _ = peer.recvmsg(LENGTH.size, space)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    if not head:
        return None, list(descriptors)
    head += _exactly(peer, LENGTH.size - len(head))
    message: dict[str, Any] = json.loads(_exactly(peer, LENGTH.unpack(head)[0]))
    return message, list(descriptors)


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = peer.recv(size - len(data))
        if not chunk:
            raise EOFError("the peer left in the middle of a message")
        data += chunk
    return data
