"""How a client and its server speak: length-prefixed messages over a UNIX socket in a private folder, descriptors beside the first one.

Marshal, because both ends are the same interpreter and json would cost the client 10 ms; _socket for the same reason (see rank_shim.py).

client: {"argv", "cwd", "env", "session"} + stdin, stdout, stderr; then {"signal": n}...; its end of file ends the rank
server: {"pid", "ticks"}, then {"code"} as waitpid gives it
"""

from __future__ import annotations

import _socket
import marshal
import sys

TYPE_CHECKING = False  # typing itself is 10 ms
if TYPE_CHECKING:
    from typing import Any

LENGTH_BYTES, INT_BYTES = 4, 4
ENV_SERVERS = "_HARNESS_SERVERS"  # the folder with the sockets
AGENT = "agent"  # its socket lies beside the folders of the sets


def send(peer: _socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    body = marshal.dumps(message)
    data = len(body).to_bytes(LENGTH_BYTES, "little") + body
    if descriptors:
        sent = peer.sendmsg(
            [data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, b"".join(each.to_bytes(INT_BYTES, sys.byteorder) for each in descriptors))]
        )
        data = data[sent:]
    peer.sendall(data)


def receive(peer: _socket.socket, num_descriptors: int = 0) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message, or None at the end of file."""
    space = _socket.CMSG_LEN(num_descriptors * INT_BYTES) if num_descriptors else 0
    head, ancillary, _, _ = peer.recvmsg(LENGTH_BYTES, space)
    payload = b"".join(data for level, kind, data in ancillary if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS))
    descriptors = [int.from_bytes(payload[at : at + INT_BYTES], sys.byteorder) for at in range(0, len(payload), INT_BYTES)]
    if not head:
        return None, descriptors
    head += _exactly(peer, LENGTH_BYTES - len(head))
    message: dict[str, Any] = marshal.loads(_exactly(peer, int.from_bytes(head, "little")))
    return message, descriptors


def _exactly(peer: _socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = peer.recv(size - len(data))
        if not chunk:
            raise EOFError("the peer left in the middle of a message")
        data += chunk
    return data
