"""The shape of the house: which room may know which, what each may load, and what is packed."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshwright

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("plans", "cost_models", "passes", "planner")
MAY_USE = {
    "plans": {"plans"},
    "cost_models": {"cost_models", "plans"},
    "passes": {"passes", "plans"},
    "planner": set(ROOMS),
    "meshwright": {"plans", "planner"},
}
# Within the planner: what stands below its calls, and what of the planner that may use.
BELOW_THE_CALLS = {
    "zoo": set(),
    "solver": set(),
    "detector": set(),
    "sharding": {"solver", "_torch"},
    "pipeline": {"solver", "zoo"},
    "resilience": {"pipeline"},
    "lifetime": {"resilience"},
}
LIMIT_LINES = 500
SOURCES = [
    path
    for folder in (*ROOMS, "meshwright", "tests", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.relative_to(ROOT).parts[:2] not in [("meshwright", room) for room in ROOMS]
]
OWN = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in MAY_USE]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    """Full dotted names of everything that a file imports; the rooms by their name under `meshwright`."""
    parts = path.relative_to(ROOT).parts
    package = [*(() if parts[0] == "meshwright" else ("meshwright",)), *parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", OWN, ids=name_of)
def test_arrows_point_down_only(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        parts = name.split(".")
        assert parts[0] not in ROOMS, f"{name}: the bare name loads every class twice"
        if parts[0] != "meshwright":
            continue
        if room != "meshwright":
            assert len(parts) > 1 and parts[1] in MAY_USE[room], f"{room} must not import {name}"
        elif len(parts) > 1 and parts[1] in ROOMS:
            assert parts[1] in MAY_USE["meshwright"], f"the face must not import {name}"


@pytest.mark.parametrize("part", BELOW_THE_CALLS)
def test_what_stands_below_the_planners_calls_does_not_know_them(part: str) -> None:
    files = sorted((ROOT / "planner" / part).rglob("*.py"))
    assert files
    for path in files:
        used = {name.split(".")[2] for name in imports(path) if name.startswith("meshwright.planner.")}
        assert used <= {part, *BELOW_THE_CALLS[part]}, f"{name_of(path)} must not use {used}"


@pytest.mark.parametrize("room", ["plans", "cost_models"])
def test_the_lower_rooms_take_no_torch(room: str) -> None:
    heavy = {"torch", "pulp"} | ({"numpy", "networkx"} if room == "plans" else set())
    for path in OWN:
        if path.relative_to(ROOT).parts[0] == room:
            assert not heavy & {name.split(".")[0] for name in imports(path)}, path


@pytest.mark.parametrize("module", ["meshwright", *(f"meshwright.{room}" for room in ROOMS)])
def test_every_face_says_what_is_public(module: str) -> None:
    code = f"import {module} as face; [getattr(face, name) for name in face.__all__]"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_file_is_too_long(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LIMIT_LINES


def private_torch_names(path: Path) -> Iterator[str]:
    """Private names of torch that a file imports or reaches by a dotted name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname and is_torch(alias.name)}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and is_torch(node.module):
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node, known)
            if name is not None and is_private(name):
                yield name
    yield from (name for name in imports(path) if is_torch(name) and is_private(name))


def is_torch(name: str) -> bool:
    return name.split(".")[0] == "torch"


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.expr, known: dict[str, str]) -> str | None:
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, known)
        return None if base is None else f"{base}.{node.attr}"
    return known.get(node.id) if isinstance(node, ast.Name) else None


@pytest.mark.parametrize("path", [path for path in OWN if path.name != "_torch.py"], ids=name_of)
def test_private_names_of_torch_are_kept_in_one_file(path: Path) -> None:
    assert sorted(set(private_torch_names(path))) == []


def python(*arguments: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    where = path if path.is_dir() else path.parent
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=600, check=False)


def test_ruff_is_content() -> None:
    done = python("-m", "ruff", "check", "--no-cache", ".")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_pyright_is_content() -> None:
    # `make lint`, which .ci/run calls, says the same in its own process.
    done = python("-m", "pyright", "--outputjson", "--pythonpath", sys.executable)
    report = json.loads(done.stdout)
    errors = [
        f"{found['file']}:{found['range']['start']['line'] + 1}: {found['message']}"
        for found in report["generalDiagnostics"]
        if found["severity"] == "error"
    ]
    assert report["summary"]["filesAnalyzed"] > 20
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(
    "code",
    [
        "import meshwright",
        "import meshwright; meshwright.Plan, meshwright.Cluster.parse('cpu:4'), meshwright.RequestError",
        "import sys; from meshwright.__main__ import main; sys.argv = ['meshwright', '--help']; main()",
        "import sys; from meshwright.__main__ import main; sys.argv = ['meshwright', 'show', 'x']; main()",
    ],
    ids=["import", "values", "help", "show"],
)
def test_light_uses_load_no_torch(code: str) -> None:
    heavy = "{'torch', 'numpy', 'pulp', 'highspy', 'networkx', 'transformers'}"
    done = python(
        "-c", f"import atexit, sys; atexit.register(lambda: print(sorted({heavy} & set(sys.modules))))\n{code}"
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "Traceback" not in done.stderr


def test_the_face_knows_its_names() -> None:
    assert set(meshwright.__all__) <= set(dir(meshwright))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = meshwright.nothing


def test_a_wheel_holds_every_room_and_nothing_else(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "shared")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=skip)
    done = python("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path), str(tree))
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("meshwright-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0].split("-")[0] for name in held} == {"meshwright"}
    for room in ROOMS:
        assert f"meshwright/{room}/__init__.py" in held
        for path in (ROOT / room).rglob("*"):
            if path.suffix in (".py", ".toml"):
                assert f"meshwright/{name_of(path)}" in held
    assert {"meshwright/py.typed", "meshwright/__main__.py"} <= held
    code = f"import meshwright; assert {str(wheel)!r} in meshwright.__file__; meshwright.Plan"
    done = python("-c", code, path=wheel)
    assert done.returncode == 0, done.stderr
