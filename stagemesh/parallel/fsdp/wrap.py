"""Which modules are units, and which parameters are whose. Pure: nothing is changed here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from stagemesh.errors import ConfigError
from stagemesh.parallel.fsdp.flat_parameter import Member

ROOT = ""
"""Name of the wrapped module itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """A unit and the parameters it gathers: those that are in no unit within it."""

    name: str
    module: nn.Module
    members: tuple[Member, ...]


def plan_units(
    module: nn.Module,
    *,
    policy: Sequence[type[nn.Module] | str] | None,
    min_param_size: int,
) -> list[UnitPlan]:
    """The units in the order of their modules, the root first.

    A parameter that is registered in several units belongs to the root, which is whole while any
    of them computes.

    Raises:
        ConfigError: the policy names a module that is not there, or one that has no forward.
    """
    names = _chosen_names(module, policy)
    modules = dict(module.named_modules())
    while True:
        members = _members_by_unit(module, names)
        # Innermost first: what is dissolved into its neighbour may make that one large enough.
        small = [
            name
            for name in reversed(names)
            if name != ROOT
            and sum(member.parameter.numel() for member in members[name]) < min_param_size
        ]
        if not small:
            return [
                UnitPlan(name=name, module=modules[name], members=tuple(members[name]))
                for name in names
            ]
        names.remove(small[0])


def _chosen_names(module: nn.Module, policy: Sequence[type[nn.Module] | str] | None) -> list[str]:
    if policy is None:
        chosen = set(_children_of_lists(module, ROOT))
    else:
        chosen = {name for entry in policy for name in _matching(module, entry)}
    for name, found in module.named_modules():
        if name in chosen and isinstance(found, nn.ModuleList | nn.ModuleDict):
            raise ConfigError(
                f"wrap_policy chooses {name!r}, a {type(found).__name__}, which has no forward to "
                "gather its parameters at; choose its children"
            )
    return [name for name, _ in module.named_modules() if name in chosen or name == ROOT]


def _matching(module: nn.Module, entry: type[nn.Module] | str) -> list[str]:
    names = [
        name
        for name, found in module.named_modules()
        if (
            entry in (name, type(found).__name__)
            if isinstance(entry, str)
            else isinstance(found, entry)
        )
    ]
    if not names:
        wanted = entry if isinstance(entry, str) else entry.__name__
        raise ConfigError(f"wrap_policy: no module has the name or class {wanted!r}")
    return names


def _children_of_lists(module: nn.Module, prefix: str) -> Iterator[str]:
    """Names of the children of ModuleLists that are in no other ModuleList."""
    for attribute, child in module.named_children():
        name = f"{prefix}.{attribute}" if prefix else attribute
        if isinstance(child, nn.ModuleList):
            yield from (f"{name}.{index}" for index, _ in child.named_children())
        else:
            yield from _children_of_lists(child, name)


def _members_by_unit(module: nn.Module, names: Sequence[str]) -> dict[str, list[Member]]:
    """Each parameter once, in the order of first registration."""
    found: dict[int, list[tuple[str, str, nn.Module, str, nn.Parameter]]] = {}
    for path, owner in module.named_modules():
        unit = _unit_of(path, names)
        for attribute, parameter in owner.named_parameters(recurse=False):
            full_name = f"{path}.{attribute}" if path else attribute
            place = (unit, full_name, owner, attribute, parameter)
            found.setdefault(id(parameter), []).append(place)
    members: dict[str, list[Member]] = {name: [] for name in names}
    for places in found.values():
        units = {unit for unit, *_ in places}
        members[units.pop() if len(units) == 1 else ROOT].append(
            Member(
                parameter=places[0][4],
                names=tuple(name for _, name, *_ in places),
                places=tuple((owner, attribute) for _, _, owner, attribute, _ in places),
            )
        )
    return members


def _unit_of(path: str, names: Sequence[str]) -> str:
    """The innermost unit that a module is in, or is."""
    around = [name for name in names if name in (ROOT, path) or path.startswith(f"{name}.")]
    return max(around, key=len)
