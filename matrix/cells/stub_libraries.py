"""Stand-ins for NVIDIA's libraries, so that a CUDA build of PyTorch loads on a machine without them.

Package indexes other than PyTorch's own have only the CUDA builds of older PyTorch releases, whose NVIDIA packages
weigh several GB. Without these packages ``import torch`` fails on the libraries that it is linked with. A stub has the
same soname, and every function that PyTorch asks of it answers "no device", so that ``torch.cuda.is_available()`` is
False.

Needs gcc and binutils (``readelf``, ``nm``).
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

#: cudaErrorNoDevice; every other library takes a number that is not 0 for an error as well.
_NO_DEVICE = 100
_NEEDED = re.compile(r"\(NEEDED\).*\[(?P<soname>[^]]+)\]")
_OURS = re.compile(r"lib(cu|nv|nccl)")
_NVIDIA = re.compile(r"(__)?(cu|nv|nccl|CU)")
#: In ``readelf -V``: a library that others' versioned symbols come from, and a version node of it.
_FILE = re.compile(r"File: (?P<soname>\S+)")
_NODE = re.compile(r"Name: (?P<node>\S+)")
_TEXT = re.compile(r"(Error|Status|Result)_?(String|Name)$")


def _run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def missing(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Soname -> version node -> functions, of the NVIDIA libraries that those in ``folder`` are linked with.

    A symbol without a version may be of any of them, so that all get it, under the node "".
    """
    libraries = sorted(path for path in folder.glob("*.so*") if path.is_file())
    sonames = {match["soname"] for path in libraries for match in _NEEDED.finditer(_run("readelf", "-d", path))}
    wanted = {name for name in sonames if _OURS.match(name) and not (folder / name).exists()}
    undefined: dict[str, set[str]] = defaultdict(set)
    defined: set[str] = set()
    nodes: dict[str, set[str]] = defaultdict(set)
    for path in libraries:
        soname = ""
        for line in _run("readelf", "-V", path).splitlines():
            if file := _FILE.search(line):
                soname = file["soname"]
            elif soname and (node := _NODE.search(line)):
                nodes[soname].add(node["node"])
        for line in _run("nm", "-D", path).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.replace("@@", "@").partition("@")
            if kind == "U":
                undefined[version].add(name)
            else:
                defined.add(name)
    bare = {name for name in undefined[""] - defined if _NVIDIA.match(name)}
    return {soname: {"": bare, **{node: undefined[node] for node in nodes[soname]}} for soname in wanted}


def source(nodes: dict[str, set[str]]) -> str:
    """The C source of one stub."""
    lines = []
    for name in sorted({name for names in nodes.values() for name in names}):
        if _TEXT.search(name):
            lines.append(f'const char *{name}(void) {{ return "no device: a stub of vllm_compat"; }}')
        else:
            lines.append(f"long {name}(void) {{ return {_NO_DEVICE}; }}")
    return "\n".join(lines) + "\n"


def version_script(nodes: dict[str, set[str]]) -> str:
    """The linker's version script: the loader looks for the versions that PyTorch was linked with."""
    return "".join(
        f"{name} {{ global: {'; '.join(sorted(names))}; }};\n" for name, names in nodes.items() if name and names
    )


def write_stubs(torch_lib: Path) -> list[str]:
    """Compile a stub for every library that is missing beside ``torch_lib``'s; returns their sonames."""
    made = missing(torch_lib)
    for soname, nodes in made.items():
        script, target = torch_lib / f"{soname}.map", torch_lib / soname
        script.write_text(version_script(nodes))
        versions = [f"-Wl,--version-script={script}"] if script.stat().st_size else []
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-x", "c", "-", f"-Wl,-soname,{soname}", *versions]
        subprocess.run([*command, "-o", str(target)], input=source(nodes), text=True, check=True)
        script.unlink()
    return sorted(made)
