"""Loads this folder as the private package `_harness_probe` and arms it. Loaded by file path, never imported by name.

The private name keeps a user's own `harness` package visible to the user's script, and ours invisible.
"""

import importlib.util
import os
import sys
from types import ModuleType

PRIVATE_NAME = "_harness_probe"


def load() -> ModuleType:
    """The private package, loaded once a process; again where a warm server has loaded another folder's."""
    folder = os.path.dirname(os.path.abspath(__file__))
    if PRIVATE_NAME in sys.modules:
        if sys.modules[PRIVATE_NAME].__path__ == [folder]:
            return sys.modules[PRIVATE_NAME]
        for name in [n for n in sys.modules if n.partition(".")[0] == PRIVATE_NAME]:
            del sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        PRIVATE_NAME,
        os.path.join(folder, "__init__.py"),
        submodule_search_locations=[folder],
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PRIVATE_NAME] = module
    spec.loader.exec_module(module)
    return module


def preload() -> None:
    """In a warm server, for the ranks that are forked off it: imports what arming imports, and arms nothing."""
    import importlib
    import pkgutil

    load()
    for name in ("arm", "failures"):
        importlib.import_module(f"{PRIVATE_NAME}.{name}")
    if "torch" in sys.modules:
        package = importlib.import_module(f"{PRIVATE_NAME}.sensors")
        for info in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{info.name}")
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        importlib.import_module(f"{PRIVATE_NAME}.sensors.compiled").skip(rules)


def is_launcher() -> bool:
    """torchrun's agent inherits the ranks' environment but is no rank; neither are multiprocessing's helper processes."""
    line = " ".join(sys.orig_argv[:8])
    if "torch.distributed.run" in line or "torch.distributed.launch" in line or "multiprocessing.resource_tracker" in line:
        return True
    return any(os.path.basename(a) == "torchrun" for a in sys.orig_argv[:4])


def show_agent_as_parent() -> None:
    """Under torchrun all ranks of a node have one parent, and scripts name what they share by `os.getppid()`; under us each has a process in
    between. Only for the rank itself: its children see their own parent."""
    agent = os.environ.pop("_HARNESS_AGENT_PID", "")
    if not agent.isdecimal():
        return
    rank, real = os.getpid(), os.getppid
    os.getppid = lambda: int(agent) if os.getpid() == rank else real()


def arm_from_environment() -> None:
    """Arm this process if the environment says that it belongs to a run; a no-op otherwise. Never raises."""
    show_agent_as_parent()
    if not os.environ.get("_HARNESS_RUN_DIR") or is_launcher():
        return
    try:
        load()
        import importlib

        importlib.import_module(PRIVATE_NAME + ".arm").arm()
    except Exception as error:  # never into the script
        if os.environ.get("_HARNESS_DEBUG"):
            sys.stderr.write(f"harness probe: {error!r}\n")
