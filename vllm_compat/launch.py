"""``vllm-compat run -- python script.py …``: a script whose processes all have the patches, before it imports anything.

``python -m vllm_compat.launch script.py …`` becomes that script: its code runs in ``__main__``, with its ``sys.argv``
and its folder first on the path. Processes that multiprocessing starts anew (vLLM's workers under ``spawn``) import
``__main__`` again before they do anything else, and find it by the name of this module: so the patches, which are named
in the environment, come first there too. A forked process has them anyway.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vllm_compat.errors import ConfigError

__all__ = ["command", "execute"]

#: The script, as an absolute path: a process that was started anew has no other way to know.
SCRIPT = "VLLM_COMPAT_SCRIPT"


def command(words: Sequence[str]) -> list[str]:
    """``["python", "script.py", "--option"]`` → the command that runs it with the patches.

    A program that is no Python is left as it is: its vLLM processes get the patches through vLLM's plugins.

    Raises:
        ConfigError: nothing to run, no such program or script, or an option of Python (``-m``, ``-c``).
    """
    if not words:
        raise ConfigError("vllm-compat run", needed="a command: vllm-compat run -- python script.py …", found="none")
    program, *rest = words
    if program.endswith(".py"):
        program, rest = sys.executable, list(words)
    path = shutil.which(program)
    if path is None:
        raise ConfigError(f"running {program}", needed="a program on the PATH", found="none of this name")
    if not Path(path).name.startswith("python"):
        return [path, *rest]
    if not rest or not Path(rest[0]).is_file():
        raise ConfigError(
            f"running {' '.join(words[:2])}",
            needed="a script: vllm-compat run -- python script.py …",
            found="an option" if rest and rest[0].startswith("-") else "no such file",
            advice="run a module by the path of its file, or call vllm_compat.enable first thing in it",
        )
    return [path, "-m", "vllm_compat.launch", *rest]


def execute(words: Sequence[str], patches: Sequence[str]) -> NoReturn:
    """Become that command, with the patches named in the environment.

    Raises:
        ConfigError: as in ``command``. VllmCompatError: there is no such patch.
    """
    from vllm_compat.patches import VARIABLE, enable_noted, noted

    arguments = command(words)
    os.environ[VARIABLE] = ",".join(dict.fromkeys((*noted(), *patches)))
    enable_noted()  # only to refuse a wrong name here
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(arguments[0], arguments)  # noqa: S606 - the user's own command


def _become(namespace: dict[str, object]) -> None:
    """Run the script in the module that is ``__main__`` here."""
    from vllm_compat.patches import enable_noted

    if namespace["__name__"] == "__main__":
        sys.argv = sys.argv[1:]
        os.environ[SCRIPT] = str(Path(sys.argv[0]).resolve())
        # Python put the current directory first, for -m.
        sys.path[0] = str(Path(os.environ[SCRIPT]).parent)
    else:
        sys.argv[0] = os.environ[SCRIPT]  # runpy wrote this file's name there
    enable_noted()
    path = Path(os.environ[SCRIPT])
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]
    # multiprocessing goes by __spec__, which stays.
    namespace.update(__file__=str(path), __doc__=None, __package__=None)
    namespace.pop("__all__", None)
    exec(code, namespace)  # noqa: S102 - the user's own script


if __name__ in ("__main__", "__mp_main__"):
    _become(globals())
