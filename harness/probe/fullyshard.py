"""The parameters of FSDP2 (`fully_shard`) by either of their two tensors: the shard, which is the module's own and the optimizer's, and the gathered
one, which takes its place in the module from a forward or `unshard()` until its memory is given back."""

from __future__ import annotations

from typing import Any


def parameters(root: Any, modules: list[Any]) -> list[tuple[str, Any, Any]]:
    """(name, shard, gathered or None) of each in these modules of a root, where this torch keeps them as known here. 0.1 us for a module that is none of
    FSDP2's."""
    held = [one for module in modules if hasattr(type(module), "_get_fsdp_state") for one in _held(module._get_fsdp_state())]
    paths = {id(module): name for name, module in root.named_modules(remove_duplicate=False)} if held else {}
    return [(_name(one, paths), one.sharded_param, getattr(one, "_unsharded_param", None)) for one in held if hasattr(one, "sharded_param")]


def waiting(root: Any, modules: list[Any]) -> list[tuple[str, Any, Any]]:
    """Of these, those whose whole gradient waits to be reduced: FSDP2 keeps it where a backward ran that was told not to."""
    held = [one for module in modules if hasattr(type(module), "_get_fsdp_state") for one in _held(module._get_fsdp_state())]
    left = {id(one.sharded_param) for one in held if hasattr(one, "sharded_param") and _waits(one)}
    return [told for told in parameters(root, modules) if id(told[1]) in left] if left else []


def _waits(one: Any) -> bool:
    return any(grad is not None for grad in (getattr(one, "unsharded_accumulated_grad", None), getattr(getattr(one, "_unsharded_param", None), "grad", None)))


def _held(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [one for group in groups for one in getattr(group, "fsdp_params", ())]


def _name(one: Any, paths: dict[int, str]) -> str:
    info = getattr(one, "_module_info", None)
    path, name = paths.get(id(getattr(info, "module", None)), ""), str(getattr(info, "param_name", ""))
    return f"{path}.{name}" if path else name
