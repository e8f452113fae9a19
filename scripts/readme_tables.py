"""Write README.md's tables: what was measured, and which flags work.

    python scripts/readme_tables.py            rewrite them, and the pictures in scripts/results
    python scripts/readme_tables.py --check    say whether they are current, and change nothing

Measured: the last line of scripts/results/layer.jsonl for each preset of bench.py, with its own
sizes under the random load, and each table, and of throughput.jsonl for each configuration.
Pictures: layer.png, the same as bars; layer_time.png, where its time goes; growth.png, the newest
sweeps over T and over E in growth.jsonl, each of one commit; throughput_NAME.png, whole runs of
each configuration; plan.png, what `python -m mok_megatron.plan` draws for DeepSeek-V3. Flags:
scripts/flag_table.py, in short. Each table stands between two comments that name it. Exit codes: 0
current, 1 not (with --check), 2 a comment is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import compare_throughput  # noqa: E402
from bench_picture import plot, waterfall  # noqa: E402
from bench_problem import PRESETS  # noqa: E402
from bench_report import Sweep, sweeps  # noqa: E402
from train_log import read_lines  # noqa: E402

from mok_megatron.config import ARGUMENT_RULES, RULES  # noqa: E402
from mok_megatron.plan import __main__ as plan  # noqa: E402
from mok_megatron.plan import chart  # noqa: E402
from mok_megatron.plan.machines import MACHINES  # noqa: E402
from mok_megatron.plan.model import PlanError, read  # noqa: E402

README = ROOT / "README.md"
RESULTS = ROOT / "scripts" / "results"
PICTURES = {
    "layer.png": "TFLOP/s of one MoE layer: mok, its peers and the bound",
    "layer_time.png": "Where its time goes: passes at their bound, and the rest",
    "growth.png": "how it grows with tokens and with experts",
    "plan.png": "what is planned for DeepSeek-V3 on up to 4096 GPUs, a model",
}
PLANNED = ROOT / "configs" / "deepseek_v3.yaml"
# Rows of what works: names of flags, or how they begin. The first that fits counts.
TOPICS = {
    "balance": (
        "--moe-router-load-balancing-type",
        "--moe-aux-loss-coeff",
        "--moe-z-loss-coeff",
        "--moe-router-force-load-balancing",
    ),
    "routing": (
        "--moe-router-",
        "--moe-input-jitter-eps",
        "--moe-enable-routing-replay",
        "--moe-expert-capacity-factor",
        "--moe-token-drop-policy",
    ),
    "recompute": ("--recompute-",),
    "parallelism, optimizer": (
        "--expert-",
        "--tensor-",
        "--sequence-parallel",
        "--pipeline-",
        "--num-virtual-",
        "--context-",
        "--use-distributed-optimizer",
        "--overlap-",
        "--clip-grad",
    ),
    "layers": ("--moe-", "--mtp-", "--multi-latent-attention", "--transformer-impl"),
    "the run": (
        "--bf16",
        "--deterministic-mode",
        "variable_seq_lengths",
        "--cuda-graph-impl",
        "--ckpt-format",
    ),
}
# Rows of the refusals: what they have in common, and the first rule of each.
KINDS = {
    "shapes": "moe_router_topk",
    "the expert's arithmetic": "activation_func",
    "how weights are stored": "expert_tensor_parallel_size",
    "number formats": "fp16",
    "determinism": "batch_invariant_mode",
    "what travels": "moe_pad_expert_input_to_capacity",
    "the shared expert": "use_grouped_gemm_for_shared_expert",
    "who drives the layer": "overlap_moe_expert_parallel_comm",
    "arguments of a run": "use_megatron_fsdp",
}


def last(lines: list[dict[str, Any]], *key: str) -> list[dict[str, Any]]:
    """The last line of each key, in the order of their first."""
    return list({tuple(line[part] for part in key): line for line in lines}.values())


def measured() -> list[dict[str, Any]]:
    """The lines of layer.jsonl that the table shows, in order."""
    lines = read_lines(RESULTS / "layer.jsonl")
    return [
        line
        for line in lines
        if line["load"] == "random"
        and (preset := PRESETS.get(line["name"])) is not None
        and dataclasses.asdict(preset) == line["shape"]
    ]


def beside(lines: list[dict[str, Any]], arms: tuple[str, ...]) -> str:
    """Of one layer's lines: the time of the faster of those arms over mok's in the last run that
    had one, and that run's commit where it is not the last run of all."""
    for line in reversed(lines):
        times = [line["arms"][arm]["times_mok"] for arm in arms if arm in line["arms"]]
        if times and "mok" in line["arms"]:
            older = "" if line is lines[-1] else f" (`{line['commit'][:9]}`)"
            return f"{min(times):.2f}x{older}"
    return "-"


def trained() -> list[dict[str, Any]]:
    """The lines of throughput.jsonl that the table shows."""
    return last(read_lines(RESULTS / "throughput.jsonl"), "name")


def growth() -> list[Sweep]:
    """The newest sweep of each kind, its lines all of one commit."""
    by_commit: dict[str, list[dict[str, Any]]] = {}
    for line in read_lines(RESULTS / "growth.jsonl"):
        by_commit.setdefault(line["commit"], []).append(line)
    every = [sweep for lines in by_commit.values() for sweep in sweeps(lines)]
    return list({(s.axis, s.name, s.load, s.table): s for s in every}.values())


def layers(lines: list[dict[str, Any]]) -> list[str]:
    """One MoE layer beside its peers: a Markdown table and what it means."""
    peers = (
        ("Megatron alltoall + TE", ("megatron", "megatron-cutlass")),
        ("SonicMoE", ("sonic",)),
        ("torch grouped_mm", ("grouped_mm",)),
    )
    rows = []
    for line in last([line for line in lines if "mok" in line["arms"]], "name", "table"):
        mok, shape = line["arms"]["mok"], line["shape"]
        cells = [
            f"{line['name'].partition('/')[0]}, {shape['experts']} experts"
            f"{' + shared' * bool(shape['shared_ffn'])}, {line['load']}",
            f"{shape['tokens']}",
            "fp32 +=" if line["table"] == "main_grad" else "bf16",
            f"{mok['forward_ms']:.2f} + {mok['backward_ms']:.2f}",
            f"{mok['both_tflops']:.0f}",
            f"{mok['of_bound']:.2f}",
        ]
        same = [x for x in lines if (x["name"], x["table"]) == (line["name"], line["table"])]
        cells += [beside(same, arms) for _, arms in peers]
        about = line["device"].partition(",")[0], line["date"], f"`{line['commit'][:9]}`"
        rows.append([*cells, *about])
    head = ["layer, load", "T", "dW", "ms fwd + bwd", "TFLOP/s", "of bound"]
    return _table([*head, *(name for name, _ in peers), "device", "date", "commit"], rows)


def trainings(lines: list[dict[str, Any]]) -> list[str]:
    """Whole runs on several dispatchers."""
    rows = []
    for line in lines:
        runs = line["dispatchers"]
        for name, run in runs.items():
            speed = run["tokens_per_s_per_rank"]
            of_mok = runs.get("mok", run)["tokens_per_s_per_rank"] / speed
            losses = run["losses"]
            rows.append(
                [
                    line["name"],
                    name,
                    line["device"].partition(",")[0],
                    f"{speed:,.0f}",
                    f"{run['step_ms']:.0f}",
                    f"{100 * run['moe_share']:.0f} %",
                    f"{run['peak_bytes'] / 1e9:.1f}",
                    f"{losses[-1]:.4f}" if losses else "-",
                    f"{of_mok:.2f}x",
                    line["date"],
                    f"`{line['commit'][:9]}`",
                ]
            )
    head = ["configuration", "dispatcher", "device", "tokens/s/GPU", "step ms", "MoE", "peak GB"]
    return _table([*head, "last loss", "mok's speed over it", "date", "commit"], rows)


def results() -> str:
    said = layers(measured())
    said += [""] * bool(said)
    said += trainings(trained())
    pictures = PICTURES | {
        throughput_picture(line): f"whole runs of {line['name']}" for line in trained()
    }
    links = [
        f"[{words}]({(RESULTS / name).relative_to(ROOT)})"
        for name, words in pictures.items()
        if (RESULTS / name).is_file()
    ]
    said += ["", *(f"!{link}" for link in links[:1]), "; ".join(links[1:])]
    return "\n".join(said).strip()


def flags() -> str:
    """Works, accepted and refused, by topic, with the tests that say so."""
    import flag_table  # it imports Megatron

    table = flag_table.rows()
    rows = []
    works = [row for row in table if row.verdict == "works"]
    by_topic: dict[str, tuple[list[str], dict[str, None]]] = {topic: ([], {}) for topic in TOPICS}
    for row in works:
        test = next(t for t in row.tests if "test_config" not in t)
        for flag in row.flags.split(", "):
            said, tests = by_topic[topic_of(flag)]
            said.append(flag)
            tests[test.partition("[")[0]] = None
    for topic, (said, tests) in by_topic.items():
        rows.append([f"**works**: {topic}", _merged(said), _tests(tests)])
    together = [row.flags.replace(", ", "` with `") for row in table if row.verdict == "accepted"]
    accepted = ", ".join(f"`{flags}`" for flags in together)
    rows.append(["accepted", accepted, "`test_config.py::test_works`"])
    firsts = {rule: kind for kind, rule in KINDS.items()}
    kind = ""
    refused = []
    for rule, row in zip(
        (*RULES, *ARGUMENT_RULES),
        (row for row in table if row.verdict == "refused"),
        strict=True,
    ):
        kind = firsts.get(rule.name, kind)
        refused.append((kind, row))
    for kind, group in groupby(refused, key=lambda pair: pair[0]):
        mine = [row for _, row in group]
        firsts_of = (row.flags.partition(" or ")[0] for row in mine)
        cells = ", ".join(f"`{flag.replace(', ', '` with `')}`" for flag in firsts_of)
        tests = dict.fromkeys(row.tests[0].partition("[")[0] for row in mine)
        rows.append([f"refused: {kind}", cells, _tests(tests)])
    return "\n".join(_table(["verdict: about", "flags", "tests"], rows))


def topic_of(flag: str) -> str:
    """Of a flag with its value. Raises KeyError for one that none of TOPICS knows."""
    name = flag.partition(" ")[0].partition("=")[0]
    for topic, known in TOPICS.items():
        if any(name == one or (one.endswith("-") and name.startswith(one)) for one in known):
            return topic
    raise KeyError(f"mok: a flag that works must be of one of TOPICS, got {flag}; name it there")


def _merged(flags: list[str]) -> str:
    """Each flag once, with all values that it has there."""
    values: dict[str, dict[str, None]] = {}
    for flag in flags:
        name, _, value = flag.partition(" ")
        values.setdefault(name, {})[value] = None
    said = (" / ".join(filter(None, of)) for of in values.values())
    return ", ".join(f"`{f'{name} {of}'.strip()}`" for name, of in zip(values, said, strict=True))


def _tests(tests: dict[str, None]) -> str:
    return ", ".join(f"`{_short(test)}`" for test in tests)


def _short(test: str) -> str:
    return test.removeprefix("tests/")


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    cells = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]


BLOCKS = {"results": results, "flags": flags}


def replaced(text: str) -> str:
    """The README with its tables made again. Raises ValueError where a comment is missing."""
    for name, make in BLOCKS.items():
        start, end = f"<!-- {name}: scripts/readme_tables.py -->\n", f"<!-- end of {name} -->"
        before, opened, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not opened or not closed:
            raise ValueError(
                f"mok: README.md must have the comments of the table {name}, got none; put "
                f"{start.strip()} and {end} where it belongs"
            )
        text = f"{before}{start}\n{make()}\n\n{end}{after}"
    return text


def main(tokens: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args(tokens).check
    if sys.stderr.isatty():
        print("mok: drawing, and importing Megatron (seconds) ...", file=sys.stderr)
    drawn = [] if check else draw()
    old = README.read_text(encoding="utf-8")
    try:
        new = replaced(old)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if check:
        print("README.md's tables are current" if new == old else "README.md's tables are old")
        return int(new != old)
    README.write_text(new, encoding="utf-8")
    print("\n".join(["README.md is current", *drawn]))
    return 0


def draw() -> list[str]:
    """The pictures; a line for each, its name or why there is none."""
    lines, curves = last(measured(), "name", "table"), growth()
    bars, times, growing = (RESULTS / f"{name}.png" for name in ("layer", "layer_time", "growth"))
    return [
        plot(bars, lines, []) or bars.name if lines else "no layer was measured",
        waterfall(times, lines) or times.name,
        plot(growing, [], curves) or growing.name if curves else "no sweep was measured",
        *(_draw_throughput(line) for line in trained()),
        _draw_plan(RESULTS / "plan.png"),
    ]


def throughput_picture(line: dict[str, Any]) -> str:
    """Its name, the one that compare_throughput.py gives it."""
    return f"throughput_{line['name']}.png"


def _draw_throughput(line: dict[str, Any]) -> str:
    name = throughput_picture(line)
    return compare_throughput.plot(RESULTS / name, line) or name


def _draw_plan(path: Path) -> str:
    machines = list(MACHINES.values())
    try:
        model = read(PLANNED)
        chart.draw(path, model, machines, plan.iterations(model, machines, plan.RUNS), plan.CAVEAT)
    except PlanError as error:
        return str(error)
    return path.name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
