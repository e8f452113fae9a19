"""Run the MoE unit tests of a Megatron-LM checkout on its own alltoall dispatcher, then on mok.

    python scripts/run_upstream_tests.py CHECKOUT                   on this machine's GPU
    python scripts/run_upstream_tests.py CHECKOUT --device cpu      under mok_megatron.cpu's shim
    python scripts/run_upstream_tests.py CHECKOUT --processes 2     under torchrun
    python scripts/run_upstream_tests.py CHECKOUT --tests tests/unit_tests/models -k moe

Nothing of the checkout is copied or changed: pytest runs inside it twice, with this file as a
plugin. In the second run every TransformerConfig that asks for alltoall gets mok. One that mok's
rules refuse stays with alltoall, and the report counts it under its rule. Upstream's experts are
mostly not SwiGLU, so most are refused; --swiglu makes them SwiGLU without biases in both runs.

A test counts for mok only if a mok layer ran in it; the last column says how many did. A test is
lost when it passed with alltoall and did not with mok, or was not reached.
Needs pytest beside what the checkout needs. Exit codes: 0 nothing lost, 1 lost, 2 wrong input, or
a run that ended early.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
MOE_TESTS = "tests/unit_tests/transformer/moe"
WRONG_INPUT = 2  # exit code
# What one test came to, from best to worst; of several ranks the worst counts.
OUTCOMES = ("skipped", "passed", "failed", "error")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One test on one rank. layers: calls of a mok layer; refused: rules that kept alltoall."""

    test: str
    outcome: str
    message: str
    layers: int
    refused: list[str]

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]


# --- the two runs ---------------------------------------------------------------------------


def main(tokens: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a Megatron-LM source tree")
    parser.add_argument(
        "--tests", nargs="+", default=[MOE_TESTS], metavar="PATH", help="in the checkout"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="pytest's: only tests that match")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    parser.add_argument("--mok-backend", default="auto", help="of the mok run")
    parser.add_argument("--swiglu", action="store_true", help="SwiGLU experts in both runs")
    parser.add_argument(
        "--deadline", type=float, default=1800, metavar="S", help="of one run, in seconds"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/upstream"), metavar="DIR", help="logs and records"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="add a JSON line to FILE")
    options = parser.parse_args(tokens)
    for path in options.tests:
        if not (options.checkout / path).exists():
            print(
                f"mok: the checkout must have the tests, got no {options.checkout / path}; "
                "name a Megatron-LM source tree, and --tests in it",
                file=sys.stderr,
            )
            return WRONG_INPUT
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Record]] = {}
    whole = True
    for dispatcher in ("alltoall", "mok"):
        print(f"[{dispatcher}] running; log in {output / f'{dispatcher}.log'}", flush=True)
        known = len(results.get("alltoall", ())) or None
        results[dispatcher], ended = run(dispatcher, options, output, known)
        if ended is not None:
            print(f"mok: the {dispatcher} run must reach its end, got {ended}; see its log")
            whole = False
    print(compare(results["alltoall"], results["mok"]))
    if options.record is not None:
        from bench_record import append, environment  # torch, which the plugin must not bring

        append(
            options.record,
            {
                "what": "the MoE unit tests of a Megatron-LM checkout on alltoall and on mok",
                **{name: dict(counts(records.values())) for name, records in results.items()},
                "with_a_mok_layer": dict(counts(r for r in results["mok"].values() if r.layers)),
                "lost": lost(results["alltoall"], results["mok"]),
                **environment(options.device, None),
            },
        )
    if not any(record.outcome == "passed" for record in results["alltoall"].values()):
        print("mok: some tests must pass with alltoall, got none; see its log")
        whole = False
    if lost(results["alltoall"], results["mok"]):
        return 1
    return 0 if whole else WRONG_INPUT


def run(
    dispatcher: str, options: argparse.Namespace, output: Path, known: int | None
) -> tuple[dict[str, Record], str | None]:
    """The tests on one dispatcher: records by test, and in words how it ended if not as it should.

    A run past its deadline is killed with all it started; what it recorded counts. `known`: how
    many tests there are, for the bar.
    """
    records = output / f"{dispatcher}.jsonl"
    for old in output.glob(f"{dispatcher}.jsonl*"):
        old.unlink()
    command = [sys.executable, "-m"]
    if options.processes > 1:
        command += ["torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={options.processes}", "-m"]
    command += ["pytest", *options.tests, "-o", "addopts=", "-ra", "-p", "no:cacheprovider"]
    command += ["-p", Path(__file__).stem, f"--mok-records={records}", f"--mok-run={dispatcher}"]
    command += [f"--mok-device={options.device}", f"--mok-backend={options.mok_backend}"]
    command += ["--mok-swiglu"] * options.swiglu + (["-k", options.k] if options.k else [])
    paths = [str(options.checkout.resolve()), str(ROOT), str(ROOT / "scripts")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "MASTER_PORT": str(port),  # the checkout's own default is one that others use too
        "MOK_MEGATRON_DISABLE": "1" if dispatcher == "alltoall" else "0",
    }
    with (output / f"{dispatcher}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=options.checkout,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            bar = tqdm(total=known, unit="test", disable=None)
            code = _wait(process, options.deadline, records, bar)
            ended = None if code in (0, 1, 5) else f"exit code {code}"  # pytest's; 1: some failed
        except subprocess.TimeoutExpired:
            ended = f"no end within {options.deadline:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return read(sorted(output.glob(f"{records.name}*"))), ended


def _wait(process: Any, deadline: float, records: Path, bar: Any) -> int:
    """The exit code; the bar counts what the (first) rank recorded meanwhile."""
    end = time.monotonic() + deadline
    with bar:
        while True:
            try:
                return int(process.wait(min(1.0, max(end - time.monotonic(), 0.01))))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= end:
                    raise
            files = sorted(records.parent.glob(f"{records.name}*"))
            bar.update(len(files[0].read_text().splitlines()) - bar.n if files else 0)


def read(files: list[Path]) -> dict[str, Record]:
    """The records of all ranks, one a test."""
    merged: dict[str, Record] = {}
    for file in files:
        for line in file.read_text().splitlines():
            record = Record(**json.loads(line))
            other = merged.setdefault(record.test, record)
            if OUTCOMES.index(record.outcome) > OUTCOMES.index(other.outcome):
                merged[record.test] = record
    return merged


# --- the report -----------------------------------------------------------------------------


def lost(alltoall: dict[str, Record], mok: dict[str, Record]) -> list[str]:
    """Each test that passed with alltoall and not with mok, and what became of it."""
    lines = []
    for test, record in alltoall.items():
        now = mok.get(test)
        if record.outcome == "passed" and (now is None or now.outcome != "passed"):
            lines.append(f"{test}: {f'{now.outcome}: {now.message}' if now else 'not reached'}")
    return lines


def counts(records: Iterable[Record]) -> Counter[str]:
    return Counter(record.outcome for record in records)


def compare(alltoall: dict[str, Record], mok: dict[str, Record]) -> str:
    """Counts by file, of both runs; what was refused; what was lost."""
    files = sorted({record.file for record in (*alltoall.values(), *mok.values())})
    width = max([len("all"), *map(len, files)])
    head = "passed failed error skipped"
    lines = [f"{'':{width}}  {'alltoall':{len(head)}}  {'mok':{len(head)}}"]
    lines.append(f"{'':{width}}  {head}  {head}  with a mok layer")
    for name in [*files, "all"]:
        row = f"{name:{width}}"
        for records in (alltoall, mok):
            mine = [r for r in records.values() if name in (r.file, "all")]
            number = counts(mine)
            row += "  " + " ".join(f"{number[word]:{len(word)}}" for word in head.split())
        on_mok = [record for record in mine if record.layers]
        passed = sum(record.outcome == "passed" for record in on_mok)
        lines.append(f"{row}  {passed} of {len(on_mok)} passed")
    refused = Counter(rule for record in mok.values() for rule in set(record.refused))
    lines += [f"stayed with alltoall in {n} tests: {rule}" for rule, n in refused.most_common()]
    gained = [t for t, r in mok.items() if t in alltoall and r.outcome == "passed"]
    gained = [t for t in gained if alltoall[t].outcome in ("failed", "error")]
    lines += [f"passed with mok only: {test}" for test in gained]
    gone = lost(alltoall, mok)
    lines += [f"passed with alltoall only: {line}" for line in gone]
    lines.append(f"mok lost {len(gone)} of {sum(r.outcome == 'passed' for r in alltoall.values())}")
    return "\n".join(lines)


# --- the plugin, inside pytest --------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mok-records", help="where to write a line for each test")
    parser.addoption("--mok-run", choices=("alltoall", "mok"))
    parser.addoption("--mok-device", choices=("cuda", "cpu"))
    parser.addoption("--mok-backend")
    parser.addoption("--mok-swiglu", action="store_true")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before the checkout's conftest imports Megatron."""
    options = early_config.known_args_namespace
    _leave_out_the_download()
    if options.mok_device == "cpu":
        _pretend_cuda()
    watch = _Watch()
    if options.mok_run == "mok":
        import mok_megatron

        mok_megatron.activate(backend=options.mok_backend)
        watch.count_layers()
    _patch_configs(options.mok_run == "mok", options.mok_swiglu, watch.refused)
    rank = os.environ.get("RANK", "")
    recorder = _Recorder(Path(f"{options.mok_records}{rank and f'.{rank}'}"), watch)
    early_config.pluginmanager.register(recorder, "mok-recorder")


def _leave_out_the_download() -> None:
    """The checkout's conftest fetches data for tests of training; those of MoE read none of it."""
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    stub: Any = ModuleType(name)
    stub.download_and_extract_asset = lambda **kwargs: True
    sys.modules[name] = stub


def _pretend_cuda() -> None:
    import torch.distributed as dist

    from mok_megatron import cpu

    cpu.install()
    original = dist.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        original("gloo", *args, **kwargs)

    dist.init_process_group = init_process_group
    parallel_state: Any = importlib.import_module("megatron.core.parallel_state")
    forget = parallel_state.destroy_model_parallel

    def destroy_model_parallel() -> None:
        forget()  # and no more: the threads of hundreds of tests' groups would stay
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    parallel_state.destroy_model_parallel = destroy_model_parallel


def _patch_configs(mok: bool, swiglu: bool, refused: list[str]) -> None:
    """mok: alltoall becomes mok, unless a rule refuses what else the config has."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.nn import functional

    original: Callable[[Any], None] = TransformerConfig.__post_init__

    def __post_init__(self: Any) -> None:
        given = dict(vars(self))
        # Where one was made from another, alltoall is mok already.
        turned = self.moe_token_dispatcher_type in ("alltoall", "mok") and self.num_moe_experts
        if turned and swiglu:
            given |= {"gated_linear_unit": True, "activation_func": functional.silu}
            given |= {"add_bias_linear": False}
        if turned and mok:
            vars(self).update(given, moe_token_dispatcher_type="mok")
            try:
                original(self)
                return
            except ValueError as error:
                if not str(error).startswith("mok: "):
                    raise
                refused.extend(line.partition(", got ")[0] for line in str(error).splitlines())
                vars(self).clear()
        vars(self).update(given, **({"moe_token_dispatcher_type": "alltoall"} if turned else {}))
        original(self)

    TransformerConfig.__post_init__ = __post_init__


class _Watch:
    """What mok did since it was last asked."""

    def __init__(self) -> None:
        self.layers = 0
        self.refused: list[str] = []

    def count_layers(self) -> None:
        layers: Any = importlib.import_module("mok_megatron.layer")
        original = layers.MokMoELayer.forward

        def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(layer, *args, **kwargs)
            self.layers += 1
            return result

        layers.MokMoELayer.forward = forward

    def take(self) -> tuple[int, list[str]]:
        taken = self.layers, list(self.refused)
        self.layers = 0
        self.refused.clear()  # the list is shared
        return taken


class _Recorder:
    """Writes a line when a test ends, so that a run that dies has told what it did."""

    def __init__(self, file: Path, watch: _Watch) -> None:
        self._file, self._watch = file, watch
        self._worst: tuple[str, str] = ("passed", "")

    def pytest_collection_finish(self) -> None:
        gc.freeze()

    def pytest_runtest_setup(self) -> None:
        """Upstream's containers destroy the groups when they are collected, if need be in the
        middle of a later test: those of a failed test are here."""
        if self._worst[0] != "passed":
            gc.collect()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "error", _last_line(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._worst = ("passed", "")
        if report.failed and self._worst[0] == "passed":
            outcome = "failed" if report.when == "call" else "error"
            self._worst = (outcome, _last_line(report))
        elif report.skipped:
            self._worst = ("skipped", "")
        if report.when == "teardown":
            self._write(report.nodeid, *self._worst)

    def _write(self, test: str, outcome: str, message: str) -> None:
        layers, refused = self._watch.take()
        record = Record(test=test, outcome=outcome, message=message, layers=layers, refused=refused)
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")


def _last_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash else report.longrepr).strip()
    return text.splitlines()[0] if crash else text.splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
