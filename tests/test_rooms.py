"""The table of rooms: who may import whom, read from the source."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the ground up. A room may import rooms of earlier lines and of its own line.
FLOORS = [
    ["distributed", "log", "optional"],
    ["files", "settings"],
    ["norm", "losses"],
    ["head"],
    ["training", "report"],
    ["codes"],
    ["metrics"],
    ["data"],
    ["model", "pretrained_heads"],
    ["adapters"],
    ["atlas", "bulk"],
    ["coder"],
    ["app"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def imports(path):
    """Modules a file names in imports, wherever they stand, but not those for type checks."""
    tree = ast.parse(path.read_text())
    for node in list(ast.walk(tree)):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def rooms_used(path):
    parts = [module.split(".") for module in imports(path)]
    return {p[1] for p in parts if p[0] == "ncl_multi" and len(p) > 1 and p[1] in FLOOR}


def room_of(path):
    return path.relative_to(ROOT / "ncl_multi").parts[0].removesuffix(".py")


PACKAGE = [p for p in sorted((ROOT / "ncl_multi").rglob("*.py")) if room_of(p) != "__init__"]


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_room_imports_one_above_it(path):
    assert room_of(path) in FLOOR, f"give {path.name} its place in the table of rooms"
    above = {room for room in rooms_used(path) if FLOOR[room] > FLOOR[room_of(path)]}
    assert not above


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: str(p.relative_to(ROOT)))
def test_adapters_never_import_each_other(path):
    parts = path.relative_to(ROOT / "ncl_multi").parts
    if parts[0] == "adapters" and len(parts) == 3:
        used = {m.split(".")[2] for m in imports(path) if m.startswith("ncl_multi.adapters.")}
        assert used <= {parts[1]}


def test_no_file_of_the_package_is_named_like_a_public_name():
    import ncl_multi

    parts = [*(ROOT / "ncl_multi").glob("*.py"), *(ROOT / "ncl_multi").glob("*/__init__.py")]
    names = {path.parent.name if path.stem == "__init__" else path.stem for path in parts}
    assert not names & set(ncl_multi.__all__)


def test_losses_and_heads_know_torch_alone():
    known = {"torch", "jaxtyping", "ncl_multi", *sys.stdlib_module_names}
    for path in PACKAGE:
        if room_of(path) in {"losses", "head", "norm", "distributed"}:
            assert {module.split(".")[0] for module in imports(path)} <= known, path


def test_recipes_and_evals_never_import_each_other():
    scripts = {p.stem for folder in ("recipes", "evals") for p in (ROOT / folder).glob("*.py")}
    # What evals share: the methods they compare with, and how settings are compared.
    scripts -= {"baselines", "choosing"}
    for folder in ("recipes", "evals"):
        for path in (ROOT / folder).glob("*.py"):
            named = set(imports(path))
            first = {module.split(".")[0] for module in named}
            assert not first & {"recipes", "evals"}, path
            assert not (first & scripts) - {path.stem, *sys.stdlib_module_names}, path
    for path in PACKAGE:
        assert not {m.split(".")[0] for m in imports(path)} & {"recipes", "evals"}, path


def test_importing_the_package_and_its_data_sets_loads_small_parts_only():
    loaded = "print(*{name.split('.')[0] for name in sys.modules})"
    script = f"import sys, ncl_multi\n{loaded}\nimport ncl_multi.data\n{loaded}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    heavy = {
        "accelerate", "matplotlib", "open_clip", "pandas", "rich", "sentence_transformers",
        "sklearn", "timm", "torch_geometric", "torchvision", "transformers", "tyro",
    }  # fmt: skip
    package, data_sets = map(set, map(str.split, done.stdout.splitlines()))
    assert not heavy & package
    assert not (heavy | {"PIL", "datasets"}) & data_sets


def test_every_public_name_is_listed_and_can_be_imported():
    import ncl_multi

    later = set(ncl_multi._LATER)
    assert {*later, "Features", "NonNegHead", "TrainConfig", "info_nce"} <= set(ncl_multi.__all__)
    assert set(ncl_multi.__all__) <= set(dir(ncl_multi))
    for name in later:
        module = ROOT / "ncl_multi" / f"{ncl_multi._LATER[name].replace('.', '/')}.py"
        defined = {getattr(node, "name", "") for node in ast.parse(module.read_text()).body}
        assert name in defined, f"{name} is not in {module}"
    tree = ast.walk(ast.parse((ROOT / "ncl_multi/__init__.py").read_text()))
    imported = {n.name for node in tree if isinstance(node, ast.ImportFrom) for n in node.names}
    assert set(ncl_multi.__all__) <= imported, "type checkers see what is imported"


def test_every_name_of_the_readme_is_public():
    import ncl_multi

    named = set(re.findall(r"\bncl\.([A-Za-z_]\w*)", (ROOT / "README.md").read_text()))
    assert named
    assert named <= set(dir(ncl_multi))


def test_the_project_has_types_pages_and_scripts_that_name_functions_that_are_there():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"Homepage", "Documentation", "Issues"} <= set(project["urls"])
    assert (ROOT / "ncl_multi/py.typed").is_file()
    scripts = project["scripts"]
    assert set(scripts) == {"ncl-atlas", "ncl-app", "ncl-encode"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        assert function in {getattr(node, "name", "") for node in tree.body}


def test_there_is_no_drawer_for_odds_and_ends():
    names = {path.stem for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    assert not names & {"utils", "common", "base", "helpers"}
