"""scripts/train.py as a user runs it: whole trainings in subprocesses, short, each with a deadline.

Megatron's start costs more than these trainings, so one run answers several questions.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
CONFIGS = ROOT / "configs"
DEADLINE = 180.0  # of one command; on two idle cores it needs 10 to 20 seconds
ITERATIONS = 6

SMALL = [
    *("--num-layers", "2"),
    *("--hidden-size", "32"),
    *("--ffn-hidden-size", "64"),
    *("--kv-channels", "8"),
    *("--moe-ffn-hidden-size", "16"),
    *("--seq-length", "32"),
    *("--max-position-embeddings", "32"),
    *("--micro-batch-size", "2"),
    *("--global-batch-size", "8"),
]
MODELS = {
    "tiny_cpu_deepseek_v3": ["--moe-layer-freq", "[0,1]"],
    "tiny_cpu_qwen3": [],
}

sys.path.insert(0, str(SCRIPTS))
import train  # noqa: E402
import train_config  # noqa: E402
import train_log  # noqa: E402
import train_text  # noqa: E402
from train_config import UserError  # noqa: E402


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of every command here: this tree's package, a text cache of its own, no launcher around."""
    outer = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    cache = tmp_path_factory.mktemp("cache")
    return {**outer, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}


def command(model: str, output: Path, *more: str) -> list[str]:
    config = str(CONFIGS / f"{model}.yaml")
    script = [sys.executable, str(SCRIPTS / "train.py"), config]
    return [*script, *SMALL, *MODELS[model], "--output", str(output), *more]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; at the deadline, a failure that leaves no process."""
    try:
        out, err = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        pytest.fail(f"no end within {DEADLINE} s: {process.communicate()}")
    return process.returncode, out, err


def start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    return finish(start(arguments, environment))


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return {line["iteration"]: line["loss"] for line in map(json.loads, lines)}


def saved(folder: Path) -> int:
    return int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


# --- whole runs -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> dict[str, tuple[Path, str, str]]:
    """Each model trained on mok and on alltoall by one command: output folder, stdout, stderr."""
    results = {}
    for model in MODELS:
        output = tmp_path_factory.mktemp(model)
        arguments = ("--compare", "alltoall", "--train-iters", str(ITERATIONS))
        code, out, err = run(
            command(model, output, *arguments, "--save-interval", "3"), environment
        )
        assert code == 0, f"{out}\n{err}"
        results[model] = (output, out, err)
    return results


@pytest.mark.parametrize("model", MODELS)
def test_mok_and_alltoall_train_alike(model: str, compared: dict[str, Any]) -> None:
    output, out, err = compared[model]
    mok, alltoall = losses(output / "mok"), losses(output / "alltoall")
    assert list(mok) == list(range(1, ITERATIONS + 1))
    # Two choices a token in fp32: every sum has the same order in both.
    assert mok == pytest.approx(alltoall, rel=1e-6)
    assert mok[ITERATIONS] < mok[1] - 0.1
    assert "difference" in out.splitlines()[-2]
    assert "they also differ" not in out
    assert "mok: MoE layers run on the reference backend" in err
    assert "tokens/s" in err
    assert err.count("mok: ") == 1, "only the backend statement, nothing of Megatron's"


@pytest.mark.parametrize("model", MODELS)
def test_a_run_leaves_what_it_promises(model: str, compared: dict[str, Any]) -> None:
    output, _, _ = compared[model]
    for folder in (output / "mok", output / "alltoall"):
        assert saved(folder) == ITERATIONS
        assert "training ..." in (folder / "logs" / "rank0.log").read_text()
        assert (folder / "logs" / "rank1.log").is_file()
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (output / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_command_again_has_nothing_to_do(
    compared: dict[str, Any], environment: dict[str, str]
) -> None:
    output, _, _ = compared["tiny_cpu_qwen3"]
    again = ("--compare", "alltoall", "--train-iters", str(ITERATIONS))
    code, out, _ = run(command("tiny_cpu_qwen3", output, *again), environment)
    assert code == 0
    assert f"already trained to iteration {ITERATIONS}" in out
    assert "difference" in out.splitlines()[-2]


@contextlib.contextmanager
def training(output: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A run without end that continues the one in `output`, with the learning rates of the run of
    ITERATIONS; yielded when it has logged four iterations, killed when the test fails.

    A run of more iterations would go over the text twice, and all of it in another order.
    """
    log = output / "mok" / "losses.jsonl"
    done = saved(output / "mok")
    endless = ("--train-iters", "20000", "--lr-decay-iters", str(ITERATIONS))
    saving = ("--save-interval", "3")
    process = start(command("tiny_cpu_qwen3", output, *endless, *saving), environment)
    started: list[psutil.Process] = []
    try:
        end = time.monotonic() + DEADLINE
        while max((line["iteration"] for line in train_log.read_lines(log)), default=0) < done + 4:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, "the training did not start"
            time.sleep(0.1)
        assert len(ranks_of(process)) == 2
        started = psutil.Process(process.pid).children(recursive=True)
        yield process
        _, alive = psutil.wait_procs(started, timeout=30)
        assert not alive, "nothing outlives its run: neither ranks nor what they started"
    finally:
        for each in [*started, process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                each.kill()


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in children if "--launched" in child.cmdline()]
    return sorted(ranks, key=lambda child: int(child.environ()["RANK"]))


def test_a_run_goes_on_after_every_ending(
    compared: dict[str, Any], environment: dict[str, str], tmp_path: Path
) -> None:
    """As if it had died: it does the same training again. Ctrl-C: saves, and continues. A killed
    rank: ends the others and leaves nothing."""
    output, _, _ = compared["tiny_cpu_qwen3"]
    unbroken = losses(output / "mok")
    folder = tmp_path / "mok"
    shutil.copytree(output / "mok", folder)
    shutil.rmtree(folder / "checkpoints" / f"iter_{ITERATIONS:07d}")
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3")

    with training(tmp_path, environment) as process:
        process.send_signal(signal.SIGINT)
        code, out, err = finish(process)
        stopped_at = saved(folder)
        assert code == 130
        assert "continuing from iteration 3" in out
        assert f"stopped by SIGINT; iteration {stopped_at} is saved" in err.splitlines()[-1]
        resumed = losses(folder)
        assert list(resumed) == list(range(1, stopped_at + 1))
        assert {i: resumed[i] for i in unbroken} == pytest.approx(unbroken, rel=1e-5)

    with training(tmp_path, environment) as process:
        killed_at = time.monotonic()
        ranks_of(process)[1].kill()
        code, out, err = finish(process)
        assert time.monotonic() - killed_at < 45, "torch's launcher gives the others 30 s"
        assert code == 1
        assert f"continuing from iteration {stopped_at}" in out
        assert "mok: every rank must live, got SIGKILL for rank 1" in err.splitlines()[-1]
        assert err.count("mok: every rank") == 1
        assert saved(folder) >= stopped_at
        kept = folder / "checkpoints" / f"iter_{saved(folder):07d}"
        assert (kept / "metadata.json").is_file(), "the checkpoint named as last is a whole one"


def test_a_rank_ends_with_the_process_that_started_it() -> None:
    """Also when that is killed: the kernel tells the rank, nobody else could."""
    rank = "import time, train_worker as w; w.end_with_parent(); print(flush=True); time.sleep(99)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    process = start([sys.executable, "-c", launcher], environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    _, alive = psutil.wait_procs([child], timeout=10)
    for each in alive:
        each.kill()
    assert not alive
    process.communicate()


# --- wrong input ------------------------------------------------------------------------


def refused(environment: dict[str, str], arguments: list[str], *words: str, ranks: int = 1) -> None:
    """The command ends with code 2 and, but for progress, one line a rank with all `words`."""
    code, _, err = run(arguments, environment)
    lines = [line for line in err.splitlines() if line.strip() and " starts, " not in line]
    assert code == 2, err
    assert len(lines) == ranks, err
    for line in lines:
        assert "mok: " in line
        for word in words:
            assert word in line


def test_wrong_input_is_refused_before_anything_starts(
    environment: dict[str, str], tmp_path: Path
) -> None:
    script = [sys.executable, str(SCRIPTS / "train.py")]
    qwen3 = str(CONFIGS / "tiny_cpu_qwen3.yaml")

    def config(text: str) -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(text)
        return str(path)

    out = ["--output", str(tmp_path / "out")]
    cases: list[tuple[list[str], tuple[str, ...]]] = [
        (["nowhere.yaml"], ("must exist", "'nowhere.yaml'")),
        ([config("a: [1")], ("must be YAML",)),
        ([config("- a\n- b")], ("must map", "list")),
        ([config("launch: {procs: 2}")], ("'procs'", "did you mean 'processes'?")),
        ([config("launch: {device: tpu}")], ("must be cpu or cuda", "'tpu'")),
        ([config("launch: {processes: 0}")], ("above 0", "got 0")),
        ([qwen3, "--data-path", "/nowhere/text"], ("/nowhere/text.bin", "/nowhere/text.idx")),
        ([qwen3, "--num-experts", "7"], ("multiple", "got 7 and 2")),
        ([qwen3, "stray"], ("must start with --", "'stray'")),
    ]
    with ThreadPoolExecutor(2) as pool:
        for future in [
            pool.submit(refused, environment, [*script, *arguments, *out], *words)
            for arguments, words in cases
        ]:
            future.result()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused(environment, [*script, qwen3, *out, "--port", port], "must be free", port)
    ranked = {**environment, "WORLD_SIZE": "2", "RANK": "0"}
    refused(ranked, [*script, qwen3, *out, "--compare", "alltoall"], "without torchrun")
    assert not (tmp_path / "out").exists()


def test_an_unknown_key_is_refused_by_every_rank(
    environment: dict[str, str], tmp_path: Path
) -> None:
    arguments = command("tiny_cpu_qwen3", tmp_path, "--num-layer", "3")
    refused(environment, arguments, "'num-layer'", "did you mean 'num-layers'?")
    logs = [path.read_text() for path in (tmp_path / "mok" / "logs").iterdir()]
    assert any("did you mean 'num-layers'?" in log for log in logs)
    assert not (tmp_path / "mok" / "checkpoints").exists()

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    code, _, err = run([*torchrun, *arguments[1:]], environment)
    assert code != 0
    assert "rank 0: mok: every key must" in err


# --- parts ------------------------------------------------------------------------------


def test_overrides_are_read_as_the_file_is() -> None:
    tokens = ["--a_b", "1", "--flag", "--off", "false", "--list", "1", "2", "--x=y"]
    expected = {"a-b": "1", "flag": True, "off": False, "list": ["1", "2"], "x": "y"}
    assert train_config.read_overrides(tokens) == expected


def test_values_become_megatrons_command_line() -> None:
    parser = train_config.OneLineParser()
    parser.add_argument("--width", type=int)
    parser.add_argument("--flag", action="store_true")
    parser.add_argument("--no-mask", action="store_false", dest="mask")
    parser.add_argument("--many", nargs="*")
    parser.add_argument("--pattern", type=str)
    parser.add_argument("--under_score", type=str)
    given = {
        "width": 3,
        "flag": True,
        "mask": False,
        "many": [1, 2],
        "pattern": [0, 1],
        "under-score": "x",
    }
    argv = train_config.to_argv(given, parser)
    assert " ".join(argv) == (
        "--width 3 --flag --no-mask --many 1 2 --pattern [0, 1] --under_score x"
    )
    assert train_config.to_argv({"flag": False, "width": None}, parser) == []
    with pytest.raises(UserError, match="flag must be true or false, got 'maybe'"):
        train_config.to_argv({"flag": "maybe"}, parser)
    with pytest.raises(UserError, match="invalid int value: 'wide'"):
        parser.parse_args(["--width", "wide"])


def test_dataset_paths_may_be_weighted(tmp_path: Path) -> None:
    for end in (".bin", ".idx"):
        (tmp_path / f"a{end}").touch()
    train_config.check_dataset({"data-path": ["0.3", f"{tmp_path}/a", 0.7, f"{tmp_path}/a"]})
    with pytest.raises(UserError, match=r"b\.bin"):
        train_config.check_dataset({"data-path": ["0.3", f"{tmp_path}/a", "0.7", f"{tmp_path}/b"]})


def sources(root: Path) -> None:
    (root / "package").mkdir(parents=True)
    (root / "site-packages").mkdir()
    (root / "b.py").write_bytes(b"b = 1\n")
    (root / "a.py").write_bytes("\u00e9".encode())
    (root / "empty.py").write_bytes(b"")
    (root / "package" / "c.py").write_bytes(b"c")
    (root / "site-packages" / "d.py").write_bytes(b"not the library")
    (root / "readme.txt").write_bytes(b"not Python")


def test_the_text_becomes_a_dataset_once(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    root, cache = tmp_path / "library", tmp_path / "cache"
    sources(root)
    prefix = train_text.standard_library_dataset(cache, root)
    dataset = IndexedDataset(str(prefix))
    documents = [dataset[i].tolist() for i in range(len(dataset))]
    assert documents == [[0xC3, 0xA9, 256], [*b"b = 1\n", 256], [*b"c", 256]]
    assert dataset[0].dtype == np.uint16

    written = prefix.with_suffix(".bin").stat().st_mtime_ns
    assert train_text.standard_library_dataset(cache, root) == prefix
    assert prefix.with_suffix(".bin").stat().st_mtime_ns == written

    (root / "b.py").write_bytes(b"b = 2\n")
    assert train_text.standard_library_dataset(cache, root) != prefix, "other content, other place"
    with pytest.raises(RuntimeError, match=r"needs the \.py files"):
        train_text.standard_library_dataset(cache, tmp_path / "nothing")


def test_many_may_write_the_dataset_at_once(tmp_path: Path) -> None:
    root, cache = tmp_path / "library", tmp_path / "cache"
    sources(root)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(train_text.standard_library_dataset, cache, root) for _ in range(16)]
        prefixes = {call.result() for call in calls}
    assert len(prefixes) == 1
    assert [path.name for path in cache.iterdir()] == [prefixes.pop().parent.name], "no leftovers"


def test_a_loss_log_forgets_what_will_be_done_again(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    lines = [json.dumps({"iteration": i, "loss": float(i)}) for i in (1, 2, 3, 4)]
    path.write_text("\n".join(lines) + '\n{"iteration": 5, "lo')
    log = train_log.LossLog(path, io.StringIO(), "mok", tokens_per_iteration=10)
    log.start(2, 4)
    log.add(3, 30.0, grad_norm=None)
    log.close()
    assert losses(tmp_path) == {1: 1.0, 2: 2.0, 3: 30.0}


@pytest.mark.parametrize("interactive", [True, False])
def test_a_bar_is_for_a_terminal_and_lines_for_a_file(interactive: bool, tmp_path: Path) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: interactive  # type: ignore[method-assign]
    log = train_log.LossLog(tmp_path / "losses.jsonl", terminal, "mok", tokens_per_iteration=10)
    log.start(0, 3)
    for iteration in (1, 2, 3):
        log.add(iteration, 5.0)
    log.close()
    shown = terminal.getvalue()
    if interactive:
        assert "\rmok 100% |" in shown
    else:
        first, last = shown.splitlines()  # what comes soon after a line is left out
        assert first == "mok 1/3: loss 5.0000"
        assert last.startswith("mok 3/3: loss 5.0000, ")


@pytest.mark.parametrize(
    ("other", "line", "code"),
    [
        (("-9", 2), "every rank must live, got SIGKILL for rank 1", 1),
        (("-9", 31), "stopped with RuntimeError: lost a peer; see", 1),  # killed by the launcher
        (("-15", 0), "stopped with RuntimeError: lost a peer; see", 1),
    ],
    ids=["a-rank-died", "a-rank-hung", "a-rank-was-told-to-end"],
)
def test_the_rank_that_failed_first_is_named(
    other: tuple[str, int], line: str, code: int, tmp_path: Path, capsys: Any
) -> None:
    config = train_config.RunConfig(path=tmp_path, launch=train_config.Launch(), arguments={})
    text = {"message": "RuntimeError: lost a peer"}
    failures = {
        0: SimpleNamespace(exitcode=1, message=text, timestamp=100),
        1: SimpleNamespace(exitcode=int(other[0]), message="", timestamp=100 + other[1]),
    }
    assert (
        train._say_failed(train.Run(config=config, folder=tmp_path, name="mok"), failures) == code
    )
    assert line in capsys.readouterr().err


def test_a_comparison_names_the_largest_difference(tmp_path: Path) -> None:
    for name, at_two in (("a", 2.0), ("b", 2.25)):
        lines = [{"iteration": 1, "loss": 3.0}, {"iteration": 2, "loss": at_two}]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = train_log.compare("a", tmp_path / "a", "b", tmp_path / "b")
    assert table.splitlines()[1].split() == ["1", "3.000000", "3.000000", "0"]
    assert "largest difference 2.5e-01 at iteration 2, over 2 iterations" in table
    assert "no iteration in both" in train_log.compare("a", tmp_path / "a", "c", tmp_path / "c")
    same = train_log.compare("a", tmp_path / "a", "a", tmp_path / "a")
    assert same.endswith("no difference in any of 2 iterations")


def test_runs_started_differently_are_told_apart(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    train_log.note_start(a, 0, {"lr": 1, "dispatcher": "mok"})
    train_log.note_start(b, 0, {"lr": 1, "dispatcher": "alltoall"})
    assert train_log.started_alike(a, b, apart_from="dispatcher")
    train_log.note_start(b, 3, {"lr": 1, "dispatcher": "alltoall"})
    assert not train_log.started_alike(a, b, apart_from="dispatcher")
