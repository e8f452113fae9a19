"""What a run shows and keeps: a progress bar (in a file or a pipe a line now and then), a JSON line
per logged iteration, plots, two runs side by side.

`losses.jsonl` belongs to the checkpoints beside it: when a run resumes, lines of iterations that it
will do again are dropped, so the file always holds one line per iteration of one training.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

_BORN = time.monotonic()  # soon after this process began
_QUIET_SECONDS = 10.0  # between two lines of progress where there is no terminal


def say_start(terminal: TextIO, label: str, what: str) -> None:
    """What a start is at; on a terminal each such line takes the place of the one before."""
    text = f"{label} starts, {seconds_since_birth():.0f} s: {what}"
    terminal.write(f"\r\x1b[K{text}" if terminal.isatty() else f"{text}\n")
    terminal.flush()


def seconds_since_birth() -> float:
    """How long this process has been running."""
    return time.monotonic() - _BORN


class LossLog:
    """Writes `losses.jsonl` and moves the bar; one object in the one process that reports."""

    def __init__(self, path: Path, terminal: TextIO, label: str, tokens_per_iteration: int) -> None:
        self.path = path
        self.terminal = terminal
        self.label = label
        self.tokens_per_iteration = tokens_per_iteration
        self._bar: tqdm[Any] | None = None
        self._said = 0.0  # when, the last line in place of the bar
        self._last: tuple[int, float] | None = None  # iteration and time of the line before

    def start(self, iteration: int, total: int) -> None:
        """`iteration`: how many are done already, in an earlier run."""
        kept = [line for line in read_lines(self.path) if line["iteration"] <= iteration]
        written = self.path.with_suffix(".tmp")
        written.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        written.replace(self.path)
        interactive = self.terminal.isatty()
        if interactive:
            self.terminal.write("\r\x1b[K")  # what say_start left
        self._bar = tqdm(
            desc=self.label,
            initial=iteration,
            total=total,
            file=self.terminal,
            disable=not interactive,
            ncols=100,
            unit="it",
            bar_format="{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} "
            "[{elapsed}<{remaining}{postfix}]",
        )

    def add(self, iteration: int, loss: float, **more: float | None) -> None:
        """One line for `iteration`; tokens/s since the line before it, null in the first."""
        if self._bar is None:
            raise RuntimeError("start() comes before add()")
        now = time.monotonic()
        speed: float | None = None
        if self._last is not None:
            before, then = self._last
            speed = round((iteration - before) * self.tokens_per_iteration / (now - then), 1)
        self._last = (iteration, now)
        line = {"iteration": iteration, "loss": loss, "tokens_per_s": speed, **more}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = f"loss {loss:.4f}" + ("" if speed is None else f", {speed:,.0f} tokens/s")
        total = self._bar.total or iteration
        if not self._bar.disable:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(iteration - self._bar.n)
        elif now - self._said > _QUIET_SECONDS or iteration >= total:
            self._said = now
            self.say(f"{self.label} {iteration}/{total}: {shown}")

    def say(self, line: str) -> None:
        """A line of text above the bar."""
        if not self.terminal.isatty():
            print(line, file=self.terminal, flush=True)
        elif self._bar is None:  # in place of what say_start left
            print(f"\r\x1b[K{line}", file=self.terminal, flush=True)
        else:
            self._bar.write(line, file=self.terminal)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A JSON-lines file, nothing if it is not there; a last line cut off by a crash is left out."""
    lines: list[dict[str, Any]] = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
    return lines


def note_start(folder: Path, iteration: int, arguments: dict[str, Any]) -> None:
    """Add a line to `starts.jsonl`: with what arguments the run was started, and from which
    iteration."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"iteration": iteration, "arguments": arguments}) + "\n")


def started_alike(first: Path, second: Path, apart_from: str) -> bool:
    """Whether two run folders were started, and started again, with the same arguments at the same
    iterations."""
    histories = []
    for folder in (first, second):
        history = read_lines(folder / "starts.jsonl")
        for start in history:
            start["arguments"].pop(apart_from, None)
        histories.append(history)
    return histories[0] == histories[1]


def compare(first: str, first_path: Path, second: str, second_path: Path) -> str:
    """A table of both curves, about ten rows of it, and the largest difference over all
    iterations."""
    a = {line["iteration"]: line["loss"] for line in read_lines(first_path)}
    b = {line["iteration"]: line["loss"] for line in read_lines(second_path)}
    both = sorted(a.keys() & b.keys())
    if not both:
        return f"no iteration in both {first_path} and {second_path}"
    step = max(1, len(both) // 10)
    shown = sorted({both[0], *both[step - 1 :: step], both[-1]})
    width = max(12, len(first), len(second))
    rows = [f"{'iteration':>9}  {first:>{width}}  {second:>{width}}  {'difference':>10}"]
    rows += [
        f"{i:>9}  {a[i]:>{width}.6f}  {b[i]:>{width}.6f}  {_size(a[i] - b[i]):>10}" for i in shown
    ]
    worst = max(both, key=lambda i: abs(a[i] - b[i]))
    if a[worst] == b[worst]:
        rows.append(f"no difference in any of {len(both)} iterations")
    else:
        most = _size(a[worst] - b[worst])
        rows.append(f"largest difference {most} at iteration {worst}, over {len(both)} iterations")
    return "\n".join(rows)


def _size(difference: float) -> str:
    return "0" if difference == 0 else f"{abs(difference):.1e}"


def plot(path: Path, curves: dict[str, Path]) -> str | None:
    """Draw losses over iterations into the PNG `path`. Returns a line that says why not, if
    matplotlib is missing."""
    try:
        os.environ.setdefault("MPLBACKEND", "agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "mok: the loss plot needs matplotlib, got none; pip install matplotlib"
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for index, (name, losses) in enumerate(curves.items()):
        lines = read_lines(losses)
        axes.plot(
            [line["iteration"] for line in lines],
            [line["loss"] for line in lines],
            label=name,
            linestyle="-" if index == 0 else "--",
            linewidth=2.5 - index,
        )
    axes.set(xlabel="iteration", ylabel="language model loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return None
