"""The launcher is `python SCRIPT` in everything that a script can see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ("-m", "mok_megatron.launch")
SCRIPT = """
import atexit, inspect, json, pickle, sys
import neighbour

class Thing:
    pass

print(json.dumps({
    "argv": sys.argv,
    "path0": sys.path[0],
    "name": __name__,
    "file": __file__,
    "main": sys.modules["__main__"].Thing is Thing,
    "spec": __spec__ is None,
    "cached": __cached__,
    "source": inspect.getsource(Thing).strip(),
    "pickle": type(pickle.loads(pickle.dumps(Thing()))).__name__,
    "neighbour": neighbour.__file__,
}))
atexit.register(lambda: print(Thing.__name__, sys.modules["__main__"].Thing is Thing))
sys.exit(int(sys.argv[1]))
"""


def run(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "neighbour.py").write_text("")
    return folder / "script.py"


@pytest.mark.parametrize("how", ["absolute", "relative", "link"])
def test_same_as_python(script: Path, tmp_path: Path, how: str) -> None:
    name = {"absolute": str(script), "relative": "job/script.py", "link": "link.py"}[how]
    if how == "link":
        (tmp_path / "link.py").symlink_to(script)
    plain = run(name, "3", "--flag", cwd=tmp_path)
    launched = run(*LAUNCH, name, "3", "--flag", cwd=tmp_path)
    assert plain.stdout != ""
    assert launched.stdout == plain.stdout
    assert (launched.returncode, plain.returncode) == (3, 3)


def test_safe_path_stays_safe(script: Path, tmp_path: Path) -> None:
    """With -P, Python does not put the script's folder on sys.path, and neither do we."""
    plain = run("-P", str(script), "0", cwd=tmp_path)
    launched = run("-P", *LAUNCH, str(script), "0", cwd=tmp_path)
    assert "No module named 'neighbour'" in plain.stderr
    assert "No module named 'neighbour'" in launched.stderr


def test_error_of_the_script_is_the_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise KeyError('mine')")
    done = run(*LAUNCH, "broken.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("KeyError: 'mine'")


@pytest.mark.parametrize("script", ["absent.py", "."])
def test_missing_script(tmp_path: Path, script: str) -> None:
    done = run(*LAUNCH, script, "--flag", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"mok: the script to launch must be a file, got {script!r}; usage: ")


def test_no_script(tmp_path: Path) -> None:
    done = run(*LAUNCH, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "usage: python -m mok_megatron.launch SCRIPT [ARGUMENT ...]\n"


def test_help(tmp_path: Path) -> None:
    done = run(*LAUNCH, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m mok_megatron.launch SCRIPT")


def test_disabled_launcher_runs_the_script(script: Path, tmp_path: Path) -> None:
    done = run(*LAUNCH, str(script), "0", cwd=tmp_path, MOK_MEGATRON_DISABLE="1")
    assert done.returncode == 0
    assert "mok: activate() does nothing while MOK_MEGATRON_DISABLE=1" in done.stderr


def test_under_torchrun(script: Path, tmp_path: Path) -> None:
    """torchrun -m mok_megatron.launch SCRIPT: torchrun's own -m, one process."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    done = run(*torchrun, *LAUNCH, str(script), "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f'"argv": ["{script}", "0"]' in done.stdout
    assert '"name": "__main__"' in done.stdout
