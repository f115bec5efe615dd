"""Writes docs/api.md, all public names with their signatures, from the docstrings.

python .ci/api.py            writes the page
python .ci/api.py --check    exit code 1 if the page is not what it would write
"""

import ast
import dataclasses
import inspect
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import ncl_multi

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
GROUPS = {
    "Models": ("SparseModel", "NonNeg(Clip|Encoder|Graph|Vision)", "wrap", "load", "pretrained"),
    "Embeddings you already have": ("Sparse.*Coder",),
    "Head": ("NonNegHead", "HeadOptions", "top_k"),
    "Losses": (
        "info_nce", "spectral", "nonneg_cross_entropy", "imitation", "InfoNCE", "Spectral",
        "NonNegCrossEntropy",
    ),
    "Training": ("fit", "TrainConfig", "StepObjective", "Health.*", "gather", "is_main"),
    "Codes": (".*",),
}  # fmt: skip


def page() -> str:
    """The whole page."""
    left = list(ncl_multi.__all__)
    lines = [
        "# Public names",
        "",
        "Written by `python .ci/api.py` from the docstrings; `import ncl_multi as ncl` first.",
        "Everything else may change without notice.",
    ]
    for group, patterns in GROUPS.items():
        names = [n for pattern in patterns for n in left if re.fullmatch(pattern, n)]
        left = [name for name in left if name not in names]
        lines += ["", f"## {group}"]
        for name in dict.fromkeys(names):
            lines += ["", *entry(name, getattr(ncl_multi, name))]
    return "\n".join(lines) + "\n"


def entry(name: str, thing: Any) -> list[str]:
    """A heading, the signature, the docstring, and for a class its methods and options."""
    fields = dataclasses.is_dataclass(thing) and name.endswith("Config")
    lines = [f"### `{name}{'' if fields else signature(thing)}`", "", *text(thing)]
    if not inspect.isclass(thing):
        return lines
    rows = options(thing) if fields else []
    # What a model has from SparseModel is shown there.
    shared = set(dir(ncl_multi.SparseModel)) if thing is not ncl_multi.SparseModel else set()
    for method, attribute in vars(thing).items():
        if method.startswith("_") or method in shared | {"forward", "extra_repr"}:
            continue
        if isinstance(attribute, property):
            rows.append(f"- `.{method}`: {first(attribute)}")
        elif callable(attribute) or isinstance(attribute, (classmethod, staticmethod)):
            bound = getattr(thing, method)
            if not inspect.isclass(bound):
                rows.append(f"- `.{method}{signature(bound)}`: {first(bound)}")
    config = vars(thing).get("config_type")
    if config and config is not ncl_multi.TrainConfig:
        rows += ["", "Options of `fit`, next to those of `TrainConfig`:", "", *options(config)]
    return [*lines, "", *rows] if rows else lines


def options(config: type) -> list[str]:
    """Fields of a config that its base does not have or has with another default."""
    before = {}
    for base in config.__mro__[1:]:
        if dataclasses.is_dataclass(base):
            before |= {f.name: f.default for f in dataclasses.fields(base)} | before
    tree = ast.parse(inspect.cleandoc(inspect.getsource(config)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    words = {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }
    return [
        f"- `{f.name}={_short(f.default)}`{': ' if f.name in words else ''}{words.get(f.name, '')}"
        for f in dataclasses.fields(config)
        if f.name not in before or before[f.name] != f.default
    ]


def first(thing: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def signature(thing: Any) -> str:
    """Names and defaults, without types: they are in the docstring and in the editor."""
    try:
        parameters = list(inspect.signature(thing).parameters.values())
    except ValueError:
        return "()"
    shown, starred = [], False
    for p in parameters:
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not starred:
            shown.append("*")
            starred = True
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        starred |= p.kind is p.VAR_POSITIONAL
        default = "" if p.default is p.empty else f"={_short(p.default)}"
        shown.append(f"{star}{p.name}{default}")
    return f"({', '.join(shown)})"


def _short(default: Any) -> str:
    if isinstance(default, (str, int, float, bool, tuple, type(None))):
        return repr(default)
    return "..."


def text(thing: Any) -> list[str]:
    """The docstring with its example as a code block."""
    about = inspect.getdoc(thing) or ""
    about = re.sub(r"^Args:\n", "", about, flags=re.M)
    about = re.sub(r"^ {4}(\w+): ", r"- `\1`: ", about, flags=re.M)
    about = re.sub(r"^ {8}(?=\S)", "  ", about, flags=re.M)
    head, example, rest = about.partition("Example:\n")
    lines = head.rstrip().splitlines()
    if example:
        lines += ["", "```python", *inspect.cleandoc(rest).splitlines(), "```"]
    return lines


if __name__ == "__main__":
    wanted = page()
    if "--check" not in sys.argv:
        PAGE.write_text(wanted)
    elif PAGE.read_text() != wanted:
        sys.exit(f"{PAGE.name} is out of date: run python .ci/api.py")
