"""How a forked rank ends: everything that the script can see, and the exit code, but not the interpreter's own clearing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import atexit, sys, weakref, os
from harness.launch import warm_end as end
atexit.register(end.spare_preloaded)
class Left:
    pass
left = Left()
left.finalizer = weakref.finalize(left, print, "finalized")
end.note_preloaded()
end.leave_at_once()
"""


def ended(script: str, tail: str = "end.expect(None)") -> subprocess.CompletedProcess[str]:
    code = f"{SERVER}\n{script}\n{tail}\n"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)})


def test_all_that_a_script_sees_of_its_end_comes_in_order() -> None:
    done = ended("""
import types, threading, time
class Held:
    def __del__(self): os.write(1, b"deleted\\n")
own = types.ModuleType("own"); own.held = Held(); own.write = os.write
sys.modules["own"] = own
Held.__del__.__globals__["os"] = os
del own
threading.Thread(target=lambda: (time.sleep(0.1), os.write(1, b"thread\\n"))).start()
atexit.register(os.write, 1, b"atexit\\n")
""")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:2] == ["thread", "atexit"]
    assert sorted(done.stdout.splitlines()[2:]) == ["deleted", "finalized"]


@pytest.mark.parametrize(("tail", "code"), [
    ("end.expect(None)", 0),
    ("end.expect(0)", 0),
    ("end.expect(7); sys.exit(7)", 7),
    ("end.expect('no data'); sys.exit('no data')", 1),
    ("raise ValueError('x')", 1),
    ("end.expect(None); sys.stdout.write('x'); os.close(1); os.open('/dev/full', os.O_WRONLY)", 120),
])  # fmt: skip
def test_the_exit_code_is_the_interpreters_own(tail: str, code: int) -> None:
    assert ended("", tail).returncode == code


def test_a_hook_that_forbids_hooks_ends_as_ever() -> None:
    done = ended("""
def forbid(event, args):
    if event == "sys.addaudithook": raise RuntimeError
sys.addaudithook(forbid)
""")
    assert (done.returncode, done.stderr) == (0, "")


def test_finalizers_of_torch_alone_are_left_out() -> None:
    script = """
def of_torch(): print("torch's")
of_torch.__module__ = "torch.library"
def of_numpy(): print("numpy's")
weakref.finalize(left, of_torch)
weakref.finalize(left, of_numpy)
end.note_preloaded()
"""
    assert ended(script).stdout.splitlines() == ["numpy's", "finalized"]


def test_the_interpreters_own_tables_are_left() -> None:
    script = """
import codecs
class Handler:
    def __call__(self, error): raise error
    def __del__(self, write=os.write): write(1, b"table\\n")
codecs.register_error("own", Handler())
"""
    assert ended(script).stdout == "finalized\n"
    assert ended(script, "end.expect(3); sys.exit(3)").stdout == "finalized\ntable\n"
