"""``vllm-compat`` and ``python -m vllm_compat``."""

from __future__ import annotations

import sys

from vllm_compat.errors import VllmCompatError

__all__ = ["main"]

# Top-level packages that an extra of ours brings; a missing one is the installation's business, not a bug.
_EXTRAS = {
    "cli": ("rich", "typer"),
    "kimi": (
        "datasets",
        "huggingface_hub",
        "matplotlib",
        "numpy",
        "pyarrow",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
    ),
}


def main() -> None:
    """Run the command line; what goes wrong on purpose is said in one paragraph, without a traceback."""
    try:
        from vllm_compat.cli import app

        app()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((extra for extra, packages in _EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        sys.stderr.write(f"This command needs {package}: pip install 'vllm-compat[{extra}]'\n")
        sys.exit(2)
    except VllmCompatError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
