"""One rank of a run: Megatron's pretraining of a GPT model, with our data, our terminal and our
endings.

Megatron's own output goes to a file per rank. The terminal gets the progress bar, lines that start
with `mok:`, and how it ended. A rank that fails leaves at once, without the destructors that would
wait for its peers.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from train_config import OneLineParser, RunConfig, UserError, check_dataset, to_argv
from train_log import LossLog, note_start, plot, say_start
from train_text import VOCAB_SIZE, standard_library_dataset

WRONG_INPUT = 2  # exit code


def run(config: RunConfig, folder: Path, *, launched: bool) -> int:
    """Train as this process's rank; `folder` is the run's. Returns the exit code, or ends the
    process on a failure.

    `launched`: by train.py itself, which then reads the failure from torch's error file and prints
    it.
    """
    end_with_parent()
    rank = int(os.environ["RANK"])
    terminal = _redirect_output(folder / "logs" / f"rank{rank}.log")
    if rank == 0:
        note_start(folder, last_checkpoint(checkpoints(config, folder)), config.arguments)
    try:
        _train(config, folder, rank, terminal)
    except KeyboardInterrupt:
        return 130
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            return 0
        traceback.print_exc()
        if terminal.isatty():
            terminal.write("\r\x1b[K")  # what say_start left
        if not str(error):  # a bare assert: its place says more than nothing
            frame = traceback.extract_tb(error.__traceback__)[-1]
            error.args = (f"{frame.line} ({Path(frame.filename).name}:{frame.lineno})",)
        _report(error, rank, None if launched else terminal)
        ours = isinstance(error, ValueError) and str(error).startswith("mok: ")
        os._exit(WRONG_INPUT if ours or isinstance(error, UserError) else 1)
    return 0


def checkpoints(config: RunConfig, folder: Path) -> Path:
    """Where a run saves, unless `save` is false, and where it continues from."""
    return Path(config.arguments.get("save") or folder / "checkpoints")


def last_checkpoint(folder: Path) -> int:
    """Iteration of the newest complete checkpoint in a checkpoint folder, 0 without one."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return int(text) if text.isdigit() else 0


def end_with_parent() -> None:
    """Linux: the kernel kills this process when the one that started it is gone, so none is ever
    orphaned."""
    if sys.platform == "linux":
        import ctypes

        parent = os.getppid()
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _redirect_output(log: Path) -> TextIO:
    """Sends file descriptors 1 and 2 to `log`; returns what stderr was. C++ libraries write there
    too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return terminal


def _report(error: BaseException, rank: int, terminal: TextIO | None) -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if terminal is None:
        get_error_handler().record_exception(error)
    else:
        print(
            f"rank {rank}: {one_line(type(error).__name__, str(error))}", file=terminal, flush=True
        )


def one_line(kind: str, message: str) -> str:
    """An exception as one line; one of ours already is."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    first = lines[0] if lines else "no message"
    return first if first.startswith("mok: ") else f"mok: training stopped with {kind}: {first}"


class _Announcements:
    """sys.stdout of a rank: everything to its log, and lines that start with `mok:` to the
    terminal."""

    def __init__(self, log: TextIO, say: Any) -> None:
        self._log = log
        self._say = say

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.startswith("mok: "):
                self._say(line)
        return self._log.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


def _train(config: RunConfig, folder: Path, rank: int, terminal: TextIO) -> None:
    label = str(config.arguments.get("moe-token-dispatcher-type", "allgather"))

    def starts(what: str) -> None:
        if rank == 0:
            say_start(terminal, label, what)

    starts("importing Megatron")
    import mok_megatron
    from mok_megatron import cpu

    mok_megatron.activate()
    if config.launch.device == "cpu":
        cpu.install()
    else:
        cpu.use_built_dataset_index()
    config = _complete(config, folder)
    check_dataset(config.arguments)

    from megatron.core.package_info import __version__ as version
    from megatron.training import arguments, training

    try:
        from megatron.training.argument_utils import (
            gpt_config_from_args,
            pretrain_cfg_container_from_args,
        )
    except ImportError as error:
        raise UserError(
            f"mok: megatron-core must be 0.19 for this script, got {version}; install it, or use "
            "the pretrain_gpt.py of your Megatron-LM, mok works there as well"
        ) from error

    parser = arguments.add_megatron_arguments(OneLineParser(allow_abbrev=False))
    argv = to_argv(config.arguments, parser)
    parser.parse_args(argv)
    sys.argv = [sys.argv[0], *argv]
    args = arguments.parse_and_validate_args()
    if args.context_parallel_size > 1:
        raise UserError(
            f"mok: context-parallel-size must be 1 here, got {args.context_parallel_size}; use "
            "Megatron-LM's pretrain_gpt.py, mok works there as well"
        )
    _save_on_interrupt()

    def datasets(*positional: Any, **named: Any) -> Any:
        built = _datasets(*positional, **named)
        starts("the first iteration, in which Megatron compiles")
        return built

    datasets.is_distributed = True  # type: ignore[attr-defined] # Megatron calls it on every rank
    losses = folder / "losses.jsonl"
    log = LossLog(
        losses, terminal, args.moe_token_dispatcher_type, args.seq_length * args.global_batch_size
    )
    reports = rank == (args.world_size - 1 if args.pipeline_model_parallel_size > 1 else 0)
    if reports:
        sys.stdout = _Announcements(sys.stdout, log.say)  # type: ignore[assignment]
        _watch(training, log, args)
    try:
        from megatron.core.enums import ModelType

        starts("building the model")
        training.pretrain(
            pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
            datasets,
            ModelType.encoder_or_decoder,
            _forward_step,
        )
    finally:
        log.close()
        if reports and losses.is_file():
            problem = plot(folder / "loss.png", {args.moe_token_dispatcher_type: losses})
            if problem:
                log.say(problem)
    import torch

    torch.distributed.destroy_process_group()


def _complete(config: RunConfig, folder: Path) -> RunConfig:
    """What the file left to us: where checkpoints go, the text, gloo on a CPU, a checkpoint on
    Ctrl-C."""
    given = config.arguments
    defaults: dict[str, Any] = {
        "save": str(checkpoints(config, folder)),
        "load": str(checkpoints(config, folder)),
        "exit-signal-handler": True,
        "data-cache-path": str(folder / "index"),
    }
    if config.launch.device == "cpu":
        defaults["distributed-backend"] = "gloo"
    if not given.keys() & {"data-path", "data-args-path", "train-data-path", "mock-data"}:
        tokenizer = f"{given.get('tokenizer-type')} of vocab-size {given.get('vocab-size')}"
        if tokenizer != f"NullTokenizer of vocab-size {VOCAB_SIZE}":
            raise UserError(
                "mok: tokenizer-type must be NullTokenizer of vocab-size "
                f"{VOCAB_SIZE} for the default text, got {tokenizer}; pass --data-path for your own"
            )
        defaults["data-path"] = str(standard_library_dataset())
    missing = {key: value for key, value in defaults.items() if key not in given}
    return config.replace(missing)


def _save_on_interrupt() -> None:
    """Ctrl-C does what --exit-signal-handler makes SIGTERM do: save after this iteration, then
    leave."""
    from megatron.training import global_vars

    args = global_vars.get_args()
    if args.exit_signal_handler:
        signal.signal(signal.SIGINT, signal.getsignal(args.exit_signal))


def _watch(training: Any, log: LossLog, args: Any) -> None:
    """Have `log` see what Megatron logs. Raises RuntimeError for a Megatron whose function
    differs."""
    original = training.training_log
    signature = inspect.signature(original)
    absent = {"loss_dict", "iteration", "grad_norm", "learning_rate"} - signature.parameters.keys()
    if absent:
        raise RuntimeError(
            f"mok: megatron.training's training_log must take {', '.join(sorted(absent))}, got a "
            "version without; use the megatron-core version named in pyproject.toml"
        )
    started = False

    def training_log(*positional: Any, **named: Any) -> Any:
        nonlocal started
        result = original(*positional, **named)
        seen = signature.bind(*positional, **named).arguments
        iteration = seen["iteration"]
        if not started:
            started = True
            log.start(iteration - 1, args.train_iters)
        if iteration % args.log_interval == 0 and "lm loss" in seen["loss_dict"]:
            grad_norm = seen["grad_norm"]
            log.add(
                iteration,
                float(seen["loss_dict"]["lm loss"]),
                grad_norm=None if grad_norm is None else float(grad_norm),
                learning_rate=seen["learning_rate"],
            )
        return result

    training.training_log = training_log


def _datasets(num_samples: Any, vp_stage: int | None = None) -> Any:
    """Train, validation and test GPTDatasets of the blend in Megatron's arguments, on every
    rank."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.training import get_args, get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, lambda: True, config).build()


def _forward_step(iterator: Any, model: Any) -> Any:
    """One micro-batch: losses [B, S] of the model, and the function that makes them Megatron's
    loss."""
    names = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")
    batch = next(iterator)
    tokens, position_ids, attention_mask, labels, loss_mask = (
        batch[name].cuda(non_blocking=True) if batch.get(name) is not None else None
        for name in names
    )
    losses = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return losses, partial(_loss, loss_mask)


def _loss(loss_mask: Any, losses: Any) -> Any:
    """Sum of the losses that count, their number, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = (losses.view(-1).float() * mask).sum()
    count = mask.sum().detach()
    import torch

    return loss, count.int(), {"lm loss": torch.stack([loss.detach(), count])}
