"""README.md: its tables are those of the results and the flags, and it is one short page."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import bench_problem  # noqa: E402
import readme_tables  # noqa: E402

README = (ROOT / "README.md").read_text()


def test_the_tables_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert readme_tables.main(["--check"]) == 0, capsys.readouterr().out


def test_it_is_one_page_and_names_files_that_exist() -> None:
    assert len(README.splitlines()) <= 200
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    named = re.findall(r"`((?:mok_megatron|scripts|configs|tests|csrc|\.ci)/[\w./]*)`", README)
    assert links
    assert named
    for path in (*links, *named):
        assert (ROOT / path).exists(), path


def _line(name: str, **more: Any) -> dict[str, Any]:
    mok = {"forward_ms": 1.0, "backward_ms": 2.0, "both_tflops": 500.4, "of_bound": 0.9}
    return {
        "name": name,
        "load": "zipf",
        "table": "main_grad",
        "shape": {"tokens": 64, "experts": 16, "shared_ffn": 8},
        "arms": {
            "mok": mok,
            "megatron": {"times_mok": 1.5},
            "megatron-cutlass": {"times_mok": 1.25},
        },
        "device": "NVIDIA H200, 132 SMs",
        "date": "2026-01-02",
        "commit": "0123456789abcdef",
        **more,
    }


def test_a_layer_is_one_row_with_the_faster_of_megatrons_paths() -> None:
    *_, row = readme_tables.layers([_line("qwen/16")])
    assert row == (
        "| qwen, 16 experts + shared, zipf | 64 | fp32 += | 1.00 + 2.00 | 500 | 0.90 | 1.25x | - "
        "| - | NVIDIA H200 | 2026-01-02 | `012345678` |"
    )
    assert readme_tables.layers([_line("x", arms={"sonic": {}})]) == []


def test_a_peer_of_an_earlier_run_is_shown_with_that_runs_commit() -> None:
    mok = _line("qwen/16")["arms"]["mok"]
    lines = [
        _line("qwen/16", arms={"mok": mok, "sonic": {"times_mok": 1.1}}, commit="a" * 40),
        _line("qwen/16", arms={"mok": mok, "sonic": {"times_mok": 1.2}}, commit="b" * 40),
        _line("qwen/16", arms={"sonic": {"times_mok": 9.9}}, commit="c" * 40),
        _line("qwen/128", arms={"mok": mok, "sonic": {"times_mok": 2.0}}, commit="d" * 40),
        _line("qwen/16", commit="e" * 40),
    ]
    *_, row, other = readme_tables.layers(lines)
    assert row.endswith(
        "| 1.25x | 1.20x (`bbbbbbbbb`) | - | NVIDIA H200 | 2026-01-02 | `eeeeeeeee` |"
    )
    assert " 2.00x | - | NVIDIA" in other


def test_a_flag_is_named_once_with_all_its_values_under_its_topic() -> None:
    said = readme_tables._merged(["--a 1", "--b", "--a 2 3", "--a 1", "c=True"])
    assert said == "`--a 1 / 2 3`, `--b`, `c=True`"
    assert readme_tables.topic_of("--moe-router-topk 8") == "routing"
    assert readme_tables.topic_of("--moe-router-load-balancing-type none") == "balance"
    assert readme_tables.topic_of("--moe-shared-expert-gate") == "layers"
    assert readme_tables.topic_of("variable_seq_lengths=True") == "the run"
    with pytest.raises(KeyError, match="mok: a flag that works must be of one of TOPICS"):
        readme_tables.topic_of("--new-flag")


def test_no_flag_that_works_is_missing_from_the_readme() -> None:
    import flag_table

    begin, end = README.index("<!-- flags"), README.index("<!-- end of flags")
    for row in flag_table.rows():
        if row.verdict in ("works", "accepted"):
            for flag in row.flags.split(", "):
                assert flag.partition(" ")[0] in README[begin:end], flag


def test_the_last_line_of_a_measurement_counts() -> None:
    lines = [{"a": 1, "b": 1}, {"a": 2, "b": 2}, {"a": 1, "b": 3}]
    assert [line["b"] for line in readme_tables.last(lines, "a")] == [3, 2]


def test_a_sweep_makes_no_rows_but_a_picture_of_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = dataclasses.asdict(bench_problem.PRESETS["qwen3-30b/16"])
    lines = [
        _line("qwen3-30b/16", shape={**preset, "tokens": tokens}, load="random", commit=commit)
        for commit, sizes in (("a" * 40, (1024, 2048, 8192)), ("b" * 40, (1024, 4096, 8192)))
        for tokens in sizes
    ]
    lines += [{**lines[-1], "load": "zipf"}]
    for name in ("layer", "growth"):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    assert readme_tables.measured() == [lines[2], lines[5]]
    (sweep,) = readme_tables.growth()
    assert sweep.lines == lines[3:6]


def test_every_picture_is_drawn_from_what_is_recorded_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    names = [f"throughput_{line['name']}.png" for line in readme_tables.trained()]
    assert len(names) >= 2
    text = (readme_tables.RESULTS / "throughput.jsonl").read_text()
    (tmp_path / "throughput.jsonl").write_text(text)
    with monkeypatch.context() as patch:
        patch.setattr(readme_tables, "RESULTS", tmp_path)
        drawn = ["no layer was measured", "layer_time.png", "no sweep was measured"]
        patch.setattr(readme_tables, "waterfall", lambda path, lines: None)
        assert readme_tables.draw() == [*drawn, *names, "plan.png"]
    for name in (*names, "plan.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert (readme_tables.RESULTS / name).is_file()
        assert f"(scripts/results/{name})" in README


def test_a_missing_comment_is_told() -> None:
    with pytest.raises(ValueError, match=r"^mok: README.md must have the comments .* results"):
        readme_tables.replaced("# nothing\n")
