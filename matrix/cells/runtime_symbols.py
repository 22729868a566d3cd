"""Let a wheel that was built against a newer C or C++ runtime load on an older one.

The CPU wheels of vLLM 0.10.2 to 0.11.2 each want one function of a glibc or libstdc++ newer than their manylinux
tag says. The loader refuses such a library by its list of versions, before any function is called. Here the entry of a
version that this machine does not have is marked weak, which the loader skips; a small library defines the function.

Run it in the cell, which has pyelftools; needs gcc where there is something to define.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from pathlib import Path

from elftools.elf.elffile import ELFFile

#: Function -> its definition in C.
_DEFINITIONS = {
    # GCC 13 initialises iostreams by this call; what older ones compiled does it in every file with <iostream>.
    "_ZSt21ios_base_library_initv": "void _ZSt21ios_base_library_initv(void) {}",
    # strtol of C23, which reads binary literals too.
    "__isoc23_strtol": (
        "long strtol(const char *, char **, int);\n"
        "long __isoc23_strtol(const char *s, char **end, int base) { return strtol(s, end, base); }"
    ),
}
_WEAK = 2  # VER_FLG_WEAK


def _here(soname: str) -> str:
    """The versions that this machine's libc or libstdc++ defines, as one string."""
    library = ctypes.CDLL(soname)
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if Path(path).name.startswith(library._name.split(".so")[0]):  # libstdc++.so.6.0.30 for libstdc++.so.6
            return Path(path).read_bytes().decode("latin-1")
    raise FileNotFoundError(soname)


def _undefined(library: Path) -> dict[str, str]:
    """Function -> version, of those above that a library wants."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        symbols, versions, needed = map(elf.get_section_by_name, (".dynsym", ".gnu.version", ".gnu.version_r"))
        if symbols is None or versions is None or needed is None:
            return {}
        names = {entry["vna_other"]: entry.name for _, entries in needed.iter_versions() for entry in entries}
        return {
            symbol.name: names.get(versions.get_symbol(index)["ndx"], "")
            for index, symbol in enumerate(symbols.iter_symbols())
            if symbol.name in _DEFINITIONS and symbol["st_shndx"] == "SHN_UNDEF"
        }


def _mark_weak(library: Path, versions: set[str]) -> None:
    """Set VER_FLG_WEAK in the entries of ``versions`` in ``.gnu.version_r`` (Elf64_Verneed, Elf64_Vernaux)."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        section = elf.get_section_by_name(".gnu.version_r")
        data, start, count = section.data(), section["sh_offset"], section["sh_info"]
        names = elf.get_section(section["sh_link"])
        places, need = [], 0
        for _ in range(count):
            _, entries, _, aux, following = struct.unpack_from("<HHIII", data, need)
            at = need + aux
            for _ in range(entries):
                _, flags, _, name, step = struct.unpack_from("<IHHII", data, at)
                if names.get_string(name) in versions:
                    places.append((start + at + 4, flags | _WEAK))
                at += step
            need += following
    content = bytearray(library.read_bytes())
    for place, flags in places:
        struct.pack_into("<H", content, place, flags)
    # Beside and renamed: uv's environments share files with its cache.
    draft = library.with_name(f"{library.name}.tmp")
    draft.write_bytes(content)
    draft.chmod(library.stat().st_mode)
    draft.replace(library)


def supply(package: Path, target: Path) -> list[str]:
    """Make the libraries of ``package`` loadable; the functions are in ``target``, to be preloaded.

    Returns the functions that had to be supplied; where there are none, ``target`` is not written.
    """
    supplied: set[str] = set()
    for library in sorted(package.glob("*.so")):
        lacking = {
            name: version
            for name, version in _undefined(library).items()
            if version not in _here("libstdc++.so.6" if version.startswith("GLIBCXX") else "libc.so.6")
        }
        if lacking:
            _mark_weak(library, set(lacking.values()))
            supplied |= lacking.keys()
    if supplied:
        code = "\n".join(_DEFINITIONS[name] for name in sorted(supplied))
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-x", "c", "-", "-o", str(target)]
        subprocess.run(command, input=code, text=True, check=True)
    return sorted(supplied)


if __name__ == "__main__":
    print(
        "runtime functions that this machine lacks:", ", ".join(supply(Path(sys.argv[1]), Path(sys.argv[2]))) or "none"
    )
