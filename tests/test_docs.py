"""What the documents promise: commands that run, pages that exist, Python that parses, the version that is packaged."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.plans.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
CODE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    """The code blocks of a page that are marked as `language`."""
    return [body for mark, body in CODE.findall(path.read_text(encoding="utf-8")) if mark == language]


def tour(path: Path) -> list[tuple[str, list[str]]]:
    """Commands of a page and the output shown for each, in order: later commands read files of earlier ones."""
    found: list[tuple[str, list[str]]] = []
    for line in (line for body in blocks(path, "console") for line in body.splitlines()):
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        elif line != "...":
            found[-1][1].append(line)
    return found


def masked(text: str) -> list[str]:
    """Lines without their numbers, units of time and spacing: prices may change, words may not."""
    bare = (re.sub(r"\d[\d.,]*(e[-+]\d+)?( (s|ms|us)\b)?", "#", line) for line in text.splitlines())
    return [" ".join(line.split()) for line in bare]


def run(words: list[str], folder: Path, limit_s: int = 300) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def follow(path: Path, folder: Path) -> None:
    """Run a page's commands in `folder`: each says what the page shows."""
    for command, shown in tour(path):
        program, *words = shlex.split(command)
        assert program == "meshwright"
        done = run(["-m", "meshwright", *words], folder)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        said = masked(done.stdout)
        missing = [line for line in shown if line and masked(line)[0] not in said]
        assert not missing, f"{command} does not say what {name_of(path)} shows: {missing}"


def test_the_readmes_tour_runs(tmp_path: Path) -> None:
    asked = {shlex.split(command)[1] for command, _ in tour(ROOT / "README.md")}
    assert asked == {"plan", "show", "check", "replay", "diff", "doctor"}
    follow(ROOT / "README.md", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in PAGES if path.parent.name == "docs" and tour(path)], ids=name_of)
def test_the_commands_of_a_page_say_what_it_shows(path: Path, tmp_path: Path) -> None:
    follow(path, tmp_path)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file, _, part = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{target} is not there"
        if part:
            assert part in anchors(found), f"{target} has no such heading"


def anchors(path: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in ROOT.glob("docs/**/*.md"):
        assert f"({name_of(path)})" in readme, path


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_python_in_the_pages_parses(path: Path) -> None:
    for body in blocks(path, "python"):
        ast.parse(body)


def test_the_changelog_knows_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(VERSION)}\b", text, re.MULTILINE)


def test_the_readme_names_what_make_has() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets and {"demo", "test"} <= named


@pytest.mark.slow
def test_the_demo_runs() -> None:
    done = run(["examples/demo.py"], ROOT)
    assert done.returncode == 0, done.stderr
    assert "largest difference" in done.stdout


@pytest.mark.slow
def test_the_training_script_runs(tmp_path: Path) -> None:
    plan, saved = str(tmp_path / "plan.json"), tmp_path / "checkpoint"
    done = run(["-m", "meshwright", "plan", "llama-tiny", "--cluster", "cpu:2", "-o", plan], tmp_path)
    assert done.returncode == 0, done.stderr
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "examples/train.py")]
    done = run([*launch, "--plan", plan, "--steps", "2", "--checkpoint", str(saved)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 1  loss" in done.stdout and (saved / ".metadata").exists()
