"""Every command says what it does: `--help` exits with 0 and more than a list of options."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 200.0


def _commands() -> dict[str, list[str]]:
    """Every script, and every module of the package, that is run by its name."""
    found = {}
    for file in sorted((*(ROOT / "scripts").glob("*.py"), *ROOT.glob("mok_megatron/**/*.py"))):
        name = file.relative_to(ROOT)
        if re.search(r"^if __name__ == .__main__.:", file.read_text(), re.MULTILINE):
            if name.parts[0] == "scripts":
                found[str(name)] = [str(file)]
            else:
                module = ".".join(name.with_suffix("").parts).removesuffix(".__main__")
                found[f"python -m {module}"] = ["-m", module]
    return found | {"python -m tests.csrc": ["-m", "tests.csrc"]}


COMMANDS = _commands()


@pytest.fixture(scope="module")
def said() -> dict[str, tuple[int, str, str]]:
    """command -> exit code, output, errors; all of them at once, since each waits for imports."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = {
        name: subprocess.Popen(
            [sys.executable, "-W", "ignore", *command, "--help"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, command in COMMANDS.items()
    }
    try:
        ended = {name: process.communicate(timeout=DEADLINE) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    return {name: (running[name].returncode, *texts) for name, texts in ended.items()}


def test_the_commands_of_the_readme_are_among_them() -> None:
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"python -m mok_megatron\.\w+", readme))
    named |= {f"scripts/{name}" for name in re.findall(r"`(\w+\.py)\b", readme)} & {
        f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py")
    }
    assert len(named) >= 5
    assert named <= COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, said: dict[str, tuple[int, str, str]]) -> None:
    code, output, errors = said[name]
    assert code == 0, errors
    assert output.startswith("usage: "), output[:80]
    assert len(output.splitlines()) >= 5
