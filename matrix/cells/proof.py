"""That an environment has the vLLM it is said to have: ``python matrix/cells/proof.py 0.16.0``, with its Python."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_compat import installed
from vllm_compat.installed import parse_release


def main(release: str) -> int:
    """0 when distribution, version and the imported package are of that release and lie in this environment."""
    here = installed()
    import vllm

    place = Path(vllm.__file__ or "").resolve()
    said = getattr(vllm, "__version__", "")
    print(
        f"{here}\nimport vllm: {said} at {place.relative_to(sys.prefix) if place.is_relative_to(sys.prefix) else place}"
    )
    wanted = parse_release(release)
    wrong = []
    if here.release != wanted:
        wrong.append(f"the distribution is of {here.version}")
    if parse_release(said) != wanted:
        wrong.append(f"the package calls itself {said}")
    if not place.is_relative_to(Path(sys.prefix).resolve()):
        wrong.append("it is not of this environment")
    if wrong:
        sys.stderr.write(f"this is not vLLM {release}: {'; '.join(wrong)}\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
