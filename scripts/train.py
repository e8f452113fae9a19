"""Train an MoE language model through Megatron: one config file, one run.

    python scripts/train.py configs/tiny_cpu_qwen3.yaml    two processes on this machine's CPU
    python scripts/train.py CONFIG --compare alltoall      and again on another dispatcher
    python scripts/train.py CONFIG --lr 1e-3               an argument of Megatron, not the file's
    python scripts/train.py CONFIG --data-path /my/text    a Megatron dataset of your own
    torchrun … scripts/train.py CONFIG                     ranks that something else starts

A run's folder (runs/NAME/DISPATCHER) holds checkpoints/, losses.jsonl, loss.png and logs/ with
Megatron's own output. The same command again continues from the last checkpoint. Ctrl-C saves one
first.

Exit codes: 0 done, 1 training failed, 2 wrong input, 130 stopped by Ctrl-C (143 by SIGTERM).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_config import (
    Launch,
    RunConfig,
    UserError,
    check_dataset,
    check_experts,
    read_config,
    read_overrides,
)
from train_log import compare, plot, read_lines, started_alike
from train_worker import WRONG_INPUT, checkpoints, end_with_parent, last_checkpoint, one_line, run

DISPATCHER = "moe-token-dispatcher-type"
SAVING_S = 1800  # how long a checkpoint may take after Ctrl-C


def main(tokens: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="train.py",
        usage="train.py CONFIG [option …] [--ARGUMENT VALUE …]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, help="a YAML file, see configs/")
    parser.add_argument(
        "--compare", metavar="DISPATCHER", help="run again on this dispatcher and show both"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: runs/NAME of the config"
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="instead of the file's launch section"
    )
    parser.add_argument(
        "--port", type=int, metavar="P", help="rendezvous port; default: any free one"
    )
    parser.add_argument("--launched", action="store_true", help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args(tokens)
    ranked = "WORLD_SIZE" in os.environ
    try:
        config = read_config(options.config).replace(read_overrides(overrides))
        launch = {
            k: getattr(options, k) for k in ("processes", "port") if getattr(options, k) is not None
        }
        config = config.relaunch(launch)
        output = options.output or Path("runs") / config.path.stem
        names = [str(config.arguments.get(DISPATCHER, "allgather"))]
        check_dataset(config.arguments)
        check_experts(config.arguments)
        if options.compare is not None and not options.launched:
            if ranked:
                raise UserError(
                    "mok: --compare starts its runs itself, got WORLD_SIZE from a launcher; run it "
                    "without torchrun"
                )
            names.append(options.compare)
        runs = [
            Run(config=config.replace({DISPATCHER: name}), folder=output / name, name=name)
            for name in names
        ]
        if ranked:
            return run(runs[0].config, runs[0].folder, launched=options.launched)
        _check_port(config.launch)
    except UserError as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT
    for each in runs:
        code = _run_here(each, tokens)
        if code:
            return code
    if len(runs) == 2:
        _show_both(*runs, output / "compare.png")
    return 0


@dataclass(frozen=True, kw_only=True)
class Run:
    config: RunConfig
    folder: Path
    name: str

    @property
    def losses(self) -> Path:
        return self.folder / "losses.jsonl"

    @property
    def checkpoints(self) -> Path:
        return checkpoints(self.config, self.folder)


def _run_here(run: Run, tokens: list[str]) -> int:
    """Start the ranks on this machine, wait for them, say how it went. Returns the exit code."""
    launch = run.config.launch
    target = int(run.config.arguments.get("train-iters") or 0)
    done = last_checkpoint(run.checkpoints)
    if target and done >= target:
        print(f"[{run.name}] already trained to iteration {done}; --train-iters N continues to N")
        _say_result(run)
        return 0
    where = {
        "cpu": "on the CPU; Megatron is shown a fake device: proves integration, not speed",
        "cuda": "on CUDA devices",
    }[launch.device]
    continued = f", continuing from iteration {done}" if done else ""
    print(
        f"[{run.name}] {run.config.path.stem}, {launch.processes} processes {where}{continued}",
        flush=True,
    )
    started = time.monotonic()
    code = _launch(run, tokens)
    if code == 0:
        _say_result(run, f" in {time.monotonic() - started:.0f} s")
    return code


def _launch(run: Run, tokens: list[str]) -> int:
    """torch.distributed's launcher, with one line for what went wrong instead of its table."""
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // run.config.launch.processes))
    )
    import logging

    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(
        logging.CRITICAL
    )  # torch's launcher; what went wrong is said below, in one line
    launch = run.config.launch
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=launch.processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{launch.port or 0}",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    command = [str(Path(__file__).resolve()), *tokens, "--launched", f"--{DISPATCHER}", run.name]
    _wait_for_saving()
    try:
        elastic_launch(config, sys.executable)("-u", *command)
    except SignalException as stop:
        return _say_stopped(run, stop.sigval)
    except ChildFailedError as failed:
        return _say_failed(run, failed.failures)
    return 0


def _wait_for_saving() -> None:
    """After Ctrl-C or SIGTERM give the ranks SAVING_S to save, not the 30 s that torch's launcher
    gives them; after a rank has failed the others keep those 30 s."""
    from torch.distributed.elastic.multiprocessing import PContext, SignalException

    close = PContext.close

    def patient(self: Any, death_sig: Any = None, timeout: int = 30) -> None:
        stopped = isinstance(sys.exception(), SignalException)
        close(self, death_sig, SAVING_S if stopped else timeout)

    PContext.close = patient


def _say_result(run: Run, took: str = "") -> None:
    lines = read_lines(run.losses)
    if lines:
        first, last = lines[0], lines[-1]
        fall = f"loss {first['loss']:.4f} -> {last['loss']:.4f}"
        print(f"[{run.name}] {fall} at iteration {last['iteration']}{took}")
    print(f"[{run.name}] losses, plot, logs and checkpoints are in {run.folder}", flush=True)


def _say_stopped(run: Run, signal_number: signal.Signals) -> int:
    done = last_checkpoint(run.checkpoints)
    kept = f"iteration {done} is saved in {run.checkpoints}" if done else "nothing is saved yet"
    name = signal_number.name
    print(f"mok: stopped by {name}; {kept}; the same command continues", file=sys.stderr)
    return 128 + signal_number


def _say_failed(run: Run, failures: dict[int, Any]) -> int:
    """One line for the rank that failed first; a rank that only lost its peer comes after it.

    `failures`: torch's ProcessFailure by rank. Returns the exit code.
    """

    earliest = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, int]:
        failure = failures[rank]
        died = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
        # torch's launcher itself kills what has not ended 30 s after another rank's failure.
        return not died or failure.timestamp - earliest >= 29, failure.timestamp

    rank = min(failures, key=order)
    code, message = failures[rank].exitcode, failures[rank].message
    if code < 0:
        name = signal.Signals(-code).name
        line = f"mok: every rank must live, got {name} for rank {rank}; the others were stopped"
    else:
        kind, _, text = (message["message"] if isinstance(message, dict) else message).partition(
            ": "
        )
        line = one_line(kind, text)
        if not text.startswith("mok: "):
            line += f"; see {run.folder / 'logs' / f'rank{rank}.log'}"
    done = last_checkpoint(run.checkpoints)
    if done and code != WRONG_INPUT:
        line += f"; the same command continues from iteration {done}"
    print(line, file=sys.stderr)
    return code if code == WRONG_INPUT else 1


def _check_port(launch: Launch) -> None:
    if launch.port is not None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", launch.port))
            except OSError as error:
                raise UserError(
                    f"mok: the rendezvous port must be free, got {launch.port}: {error.strerror}; "
                    "choose another with --port, or leave it out"
                ) from error


def _show_both(first: Run, second: Run, png: Path) -> None:
    print(f"\n{compare(first.name, first.losses, second.name, second.losses)}")
    if not started_alike(first.folder, second.folder, DISPATCHER):
        print("they also differ by how they were started, see starts.jsonl of each")
    problem = plot(png, {first.name: first.losses, second.name: second.losses})
    print(problem or f"both curves are in {png}")


if __name__ == "__mp_main__":  # a server that Megatron's checkpoints start beside each rank
    end_with_parent()
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
