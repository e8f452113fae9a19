"""Every loop of the kernels that waits for another thread ends by a deadline: a walk of the source.

A look is a function whose instruction reads what other threads write in their own time, or that
returns what such a function has read; and so is a read through `volatile`, or an atomic that gives
a word's value back as a lock's would. A loop waits when nothing but a look ends it. Then each turn
must come to the deadline of a Stopwatch that runs since before the loop, or to a function that has
one. What a loop's own text cannot say, such as which thread signals, the protocol's model does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
FILES = sorted(path for kind in ("h", "cuh", "cu") for path in CSRC.rglob(f"*.{kind}"))
LOAD = re.compile(r"\bld\.(?:acquire|volatile|relaxed)|mbarrier\.(?:try|test)_wait")
DIRECT = r"(?<!asm )\bvolatile\b|\batomic(?:CAS|Exch|Or|And)\w*\("
NO_NAMES = {"if", "for", "while", "switch", "constexpr", "return", "asm", "volatile", "sizeof"}


@dataclass(frozen=True)
class Loop:
    """start: in the file; condition: None where it is counted; body: without loops inside it.
    before: the function's text in front of it."""

    start: int
    condition: str | None
    body: str
    before: str


def plain(text: str) -> str:
    """Of the same length and lines, without comments, and of strings the names of instructions."""

    def without(match: re.Match[str]) -> str:
        kept = "" if match[0].startswith("/") else r"\w+(?:\.\w+)+|"
        return re.sub(rf"({kept}\n)|.", lambda one: one[1] or " ", match[0], flags=re.DOTALL)

    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', without, text, flags=re.DOTALL)


def closing(text: str, at: int) -> int:
    """Behind the bracket that closes the one at `at`."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] in "({[") - (text[place] in ")}]")
        if depth == 0:
            return place + 1
    raise AssertionError(f"no end of {text[at : at + 80]!r}")


def statement_end(text: str, at: int) -> int:
    """Behind the statement, or the block, that begins at `at`."""
    while text[at] not in ";{":
        at = closing(text, at) if text[at] in "([" else at + 1
    return at + 1 if text[at] == ";" else closing(text, at)


def functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Name, begin and end of the body of each that is defined."""
    for match in re.finditer(r"\b(\w+)\s*\(", text):
        if match[1] in NO_NAMES:
            continue
        end = closing(text, match.end() - 1)
        opening = re.compile(r"\s*(?:const\b\s*)?(?:noexcept\b\s*)?\{").match(text, end)
        if opening is not None:
            yield match[1], opening.end() - 1, closing(text, opening.end() - 1)


def spans(text: str, begin: int, end: int) -> Iterator[tuple[int, int, str, bool, int]]:
    """Of each loop: begin, end, condition, whether it counts, and the begin of its body."""
    tails = set()
    for match in re.finditer(r"\b(for|while|do)\b\s*", text[begin:end]):
        at, behind = begin + match.start(), begin + match.end()
        if at in tails:
            continue
        if match[1] == "do":
            tail = text.index("while", statement_end(text, behind))
            tails.add(tail)
            first = text.index("(", tail)
            yield at, statement_end(text, tail), text[first : closing(text, first)], False, behind
            continue
        body = closing(text, behind)
        head = text[behind + 1 : body - 1]
        counts = False
        if match[1] == "for":
            _, head, step = head.split(";") if ";" in head else ("", "of a range", "its next")
            counts = bool(head.strip() and step.strip())
        yield at, statement_end(text, body), head, counts, body


def loops(text: str, looks: re.Pattern[str]) -> Iterator[Loop]:
    for _, begin, end in functions(text):
        found = list(spans(text, begin, end))
        for at, stop, condition, counts, body in found:
            own = list(text[body:stop])
            for a, b, *_ in found:
                if body <= a and b <= stop:
                    own[a - body : b - body] = " " * (b - a)
            counted = counts and not looks.search(condition)
            yield Loop(at, None if counted else condition, "".join(own), text[begin:at])


def called(names: set[str]) -> str:
    return rf"\b(?:{'|'.join(sorted(names))})\("


def vocabulary(texts: list[str]) -> tuple[re.Pattern[str], set[str]]:
    """What looks, and the functions with a deadline: of several of a name, all."""
    bodies = [(name, text[begin:end]) for text in texts for name, begin, end in functions(text)]
    looks = {name for name, body in bodies if LOAD.search(body)}
    waits = {name for name, body in bodies if ".passes(" in body}
    assert looks
    assert waits
    while True:
        again = re.compile(rf"\breturn\b[^;]*{called(looks)}")
        more = {name for name, body in bodies if again.search(body)}
        through = re.compile(called(waits))
        without = {name for name, body in bodies if not reaches(body[1:-1], through)}
        always = {name for name, _ in bodies} - without
        if more <= looks and always <= waits:
            looks -= waits
            return re.compile(f"{DIRECT}|{called(looks)}"), waits
        looks, waits = looks | more, waits | always


def reaches(body: str, wanted: re.Pattern[str]) -> bool:
    """Whether every way through a block comes to a statement with `wanted`: one at its top level,
    behind no condition, that no statement before jumps over."""
    at = 0
    while at < len(body):
        if body[at].isspace():
            at += 1
            continue
        end = statement_end(body, at) if re.search(r"[;{]", body[at:]) else len(body)
        statement = body[at:end]
        conditional = re.match(r"(if|else|for|while|switch)\b", statement)
        if conditional is None and wanted.search(statement):
            return True
        if re.search(r"\b(?:continue|return|goto)\b", statement):
            return False
        at = end
    return False


def bounded(loop: Loop, waits: set[str]) -> bool:
    """Whether each turn comes to a deadline."""
    body = loop.body.strip()
    inside = body[1:-1] if body.startswith("{") else body
    for watch in re.findall(r"\bStopwatch\s+(\w+)", loop.before):
        if re.search(rf"\bStopwatch\s+{watch}\b", loop.body):
            continue  # begins again in every turn
        look = re.search(rf"\b{watch}\.passes\(", inside)
        if look is not None and not re.search(r"\b(?:continue|goto)\b", inside[: look.start()]):
            return True
    return reaches(inside, re.compile(called(waits)))


def endless(text: str, looks: re.Pattern[str], waits: set[str]) -> tuple[int, list[int]]:
    """How many loops wait, and the lines of those without a deadline."""
    waiting, wrong = 0, []
    for loop in loops(text, looks):
        if loop.condition is None:
            continue
        empty = loop.body.strip() in (";", "{}") and loop.condition.strip()
        if not empty and not looks.search(loop.condition + loop.body):
            continue
        waiting += 1
        if not bounded(loop, waits):
            wrong.append(text.count("\n", 0, loop.start) + 1)
    return waiting, wrong


TEXTS = {path: plain(path.read_text()) for path in FILES}
LOOKS, WAITS = vocabulary([*TEXTS.values()])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CSRC)))
def test_every_loop_that_waits_has_a_deadline(path: Path) -> None:
    _, wrong = endless(TEXTS[path], LOOKS, WAITS)
    assert not wrong, f"{path.name}, lines {wrong}: loops that wait without a deadline"


def test_the_walk_finds_what_looks_what_waits_and_the_loops() -> None:
    for name in ("completed", "load_acquire", "load_acquire_system", "ready", "abort_of"):
        assert LOOKS.search(f"{name}(word)"), name
    assert {"wait", "wait_count", "await_start", "await_arrival", "front"} <= WAITS
    found = {
        path.name: endless(TEXTS[path], LOOKS, WAITS)[0]
        for path in FILES
        if path.parent.name == "device"
    }
    assert found["ptx.cuh"] >= 2
    assert found["symmetric.cuh"] >= 2


ENDLESS = {
    "while": "while (load_acquire(word) < 1) __nanosleep(20);",
    "empty": "while (!completed(barrier, 1)) {}",
    "plain word": "while (*word == 0);",
    "volatile": "while (*static_cast<volatile int*>(word) == 0) __nanosleep(20);",
    "for ever": "for (;;) {\n  if (load_acquire_system(word) == 1) return;\n}",
    "counts only": "for (int i = 0;; ++i) if (load_acquire(word) > 0) break;",
    "counts and looks": "for (int i = 0; !completed(barrier, 1); ++i) work();",
    "do": "do {\n  work();\n} while (load_acquire(word) < 1);",
    "through another": "while (!tiles.ready()) work();",
    "lock": "while (atomicCAS(word, 0u, 1u) != 0) __nanosleep(20);",
    "in a counted loop": (
        "for (int i = 0; i < 4; ++i) {\n  while (load_acquire(word + i) < 1) work();\n}"
    ),
    "no watch": "for (;;) {\n  if (load_acquire(word) > 0) return;\n  if (late) fail(fault);\n}",
    "watch begins again": (
        "const Stopwatch watch;\nwhile (load_acquire(word) < 1) {\n  const Stopwatch watch;\n"
        "  if (watch.passes(limit)) fail(fault);\n}"
    ),
    "watch in vain": (
        "const Stopwatch watch;\nfor (;;) {\n  if (load_acquire(word) < 1) continue;\n"
        "  if (watch.passes(limit)) fail(fault);\n}"
    ),
    "waits now and then": (
        "for (;;) {\n  if (load_acquire(word) > 0) return;\n  if (odd) wait(barrier, 1, f, tag);\n}"
    ),
    "waits elsewhere": "wait(barrier, 1, f, tag);\nwhile (load_acquire(word) < 1) __nanosleep(20);",
    "in a comment": "while (load_acquire(word) < 1) {  // watch.passes(limit)\n}",
}
BOUNDED = {
    "deadline": (
        "const Stopwatch watch;\nwhile (!completed(barrier, 1)) {\n"
        "  if (watch.passes(limit)) fail(fault);\n}"
    ),
    "looks, then waits": (
        "for (;;) {\n  if (!tiles.ready()) work();\n  wait(barrier, 1, fault, tag);\n}"
    ),
    "counted": "for (int i = 0; i < 4; ++i) sum += load_acquire(word + i);",
    "for others": "while (low < high) low = middle(low, high);",
    "in a comment": "// while (load_acquire(word) < 1);\nwork();",
}


@pytest.mark.parametrize("lines", ENDLESS.values(), ids=ENDLESS)
def test_a_planted_loop_without_a_deadline_is_found(lines: str) -> None:
    path = CSRC / "device" / "ptx.cuh"
    line, planted = _planted(path, lines)
    waiting, wrong = endless(planted, LOOKS, WAITS)
    assert waiting == endless(TEXTS[path], LOOKS, WAITS)[0] + 1
    assert len(wrong) == 1
    assert line <= wrong[0] <= line + lines.count("\n")


@pytest.mark.parametrize("lines", BOUNDED.values(), ids=BOUNDED)
def test_a_loop_with_a_deadline_is_not_blamed(lines: str) -> None:
    assert endless(_planted(CSRC / "device" / "ptx.cuh", lines)[1], LOOKS, WAITS)[1] == []


@pytest.mark.parametrize(
    ("file", "deadline", "removed"),
    [
        ("ptx.cuh", "if (watch.passes(wait_limit.own_ns)) fail(fault, tag, parity);", ""),
        ("ptx.cuh", "if (watch.passes(wait_limit.own_ns)) fail(fault, tag, static", "f(static"),
        ("symmetric.cuh", " && !watch.passes(patience_ns)", ""),
        ("symmetric.cuh", " && !watch.passes(wait_limit.other_ns)", ""),
    ],
    ids=["wait", "wait_count", "await_start", "await_arrival"],
)
def test_a_kernel_without_its_deadline_is_found(file: str, deadline: str, removed: str) -> None:
    path = CSRC / "device" / file
    text = path.read_text()
    assert text.count(deadline) == 1
    without = text.replace(deadline, removed)
    assert len(endless(plain(without), LOOKS, WAITS)[1]) == 1


def _planted(path: Path, lines: str) -> tuple[int, str]:
    """A function of these lines at the end of a file, and where they begin."""
    text = f"{path.read_text()}__device__ void planted() {{\n"
    return text.count("\n") + 1, plain(f"{text}{lines}\n}}\n")
