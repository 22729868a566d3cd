"""Which symbols are recorded: ``matrix/api/targets.toml``, and the names that moved, ``vllm_compat/moved.toml``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from vllm_compat.adapters import moves

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TARGETS = Path(__file__).parents[1] / "api" / "targets.toml"


@dataclass(frozen=True)
class Target:
    """A symbol, and the modules in which releases have it.

    Attributes:
        name: Its name in the module.
        modules: Candidates; the first is where new releases have it.
        key: What it is called in the record; differs from ``name`` where two symbols share it.
        subclassed: Plugins subclass it or call its methods, so all of them are recorded.
        located: Only where it is and what calling it takes are recorded.
    """

    name: str
    modules: tuple[str, ...]
    key: str
    subclassed: bool = False
    located: bool = False

    @classmethod
    def parse(cls, text: str, *, subclassed: bool = False) -> Target:
        """``"vllm.utils.hashing | vllm.utils : sha256"``, with `` as KEY`` behind it when the name is not unique."""
        modules, _, name = text.partition(":")
        name, _, key = name.partition(" as ")
        return cls(name.strip(), tuple(part.strip() for part in modules.split("|")), (key or name).strip(), subclassed)


def load(path: Path = TARGETS) -> dict[str, list[Target]]:
    """Surface -> targets.

    Raises:
        ValueError: two targets have the same key.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    surfaces: dict[str, list[Target]] = {}
    seen: set[str] = set()
    for surface, lists in table.items():
        targets = [Target.parse(text) for text in lists.get("symbols", ())]
        targets += [Target.parse(text, subclassed=True) for text in lists.get("classes", ())]
        for target in targets:
            if target.key in seen:
                msg = f"{path.name}: two targets are called {target.key}; name one of them with ' as '"
                raise ValueError(msg)
            seen.add(target.key)
        surfaces[surface] = targets
    if path == TARGETS:
        surfaces["moved"] = [target for target in moved() if target.key not in seen]
    return surfaces


def moved() -> list[Target]:
    """A target for every name of ``moved.toml``, with all the places that the table knows, the newest first."""
    places: dict[str, list[str]] = {}
    for move in moves.table().values():
        for place in reversed(move.places):
            module, _, name = place.symbol.partition(":")
            if module and module not in places.setdefault(name, []):
                places[name].append(module)
    return [Target(name, tuple(modules), name, located=True) for name, modules in sorted(places.items())]
