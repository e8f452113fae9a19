"""The command as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mok_megatron.plan.__main__ import CAVEAT, main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
QWEN = str(CONFIGS / "qwen3_30b_a3b.yaml")
MACHINES = ("H100", "H200", "GB200", "GB300")


def test_the_table_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([QWEN]) == 0
    out = capsys.readouterr().out
    assert CAVEAT in out
    assert "30.53 billion parameters" in out
    lines = [line.split() for line in out.splitlines()]
    found = [tuple(line[:3]) for line in lines if line and line[0] in MACHINES]
    found = [each for each in found if each[1].isdigit()]
    assert found[:16] == [
        (machine, ranks, ep)
        for machine in MACHINES
        for ranks, ep in zip(
            ("1", "8", "64", "72"), ("1", "8", "8" if machine[0] == "H" else "64", "8"), strict=True
        )
    ]
    assert found[16:] == [
        (machine, ranks, "-" if ranks == "4096" else "1")
        for machine in MACHINES
        for ranks in ("8", "64", "512", "4096")
    ]
    assert "a batch of 1024 is no multiple of 4096 replicas x 1" in out
    assert "measured" in out
    assert "datasheet" in out


def test_a_model_with_mtp_is_counted_as_it_is_published(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(CONFIGS / "deepseek_v3.yaml"), "--ranks", "8", "--machines", "h200"]) == 0
    head = " ".join(capsys.readouterr().out.split("\n\n")[0].split())
    assert "671 billion parameters; MTP adds 11.61 (published counts add" in head
    assert "that it shares: 13.46); 58 MoE layers and 1 of MTP of 256 experts" in head


def test_json_has_the_same_and_the_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([QWEN, "--json", "--ranks", "8,512", "--machines", "h200"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["caveat"] == CAVEAT
    assert [row["ranks"] for row in answer["rows"]] == [8, 512]
    row = answer["rows"][0]
    assert row["flops"] == [6 * 4096 * 8 * 2048 * 768, 12 * 4096 * 8 * 2048 * 768]
    assert row["transfer_bytes"] == 2 * 4096 * 8 * 2048 * 7 / 8
    assert row["forward_ms"]["best"] < row["forward_ms"]["worst"]
    assert answer["inputs"]["H200"]["memory"]["kind"] == "measured"
    eight, many = answer["memory_bytes"]
    assert round(eight["state"] / 1e9) == 77
    assert round(many["state"] / 1e9) == 32
    assert eight["fits"] == ["H200"]
    assert [run["micro_batches"] for run in answer["iterations"]] == [128, 2]
    assert answer["inputs"]["network_share"]["kind"] == "assumed"
    assert "throughput.jsonl" in answer["inputs"]["rest_most"]["source"]


def test_an_override_replaces_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [QWEN, "--json", "--ranks", "8", "--machines", "h200"]
    assert main([*arguments, "--micro-batch-size", "2", "--moe-router-topk=4"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"]["tokens"] == 8192
    assert answer["model"]["top_k"] == 4


def test_a_pipeline_that_so_many_ranks_cannot_form(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / "deepseek_v3.yaml")
    assert main([config, "--json", "--ranks", "8,512", "--machines", "h200"]) == 0
    eight, many = json.loads(capsys.readouterr().out)["memory_bytes"]
    assert eight["state"] is None
    assert eight["fits"] == []
    assert round(many["state"] / 1e9) == 57


def test_the_plot_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "steps.png"
    assert main([QWEN, "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert str(png) in capsys.readouterr().err


def test_without_matplotlib_the_plot_is_an_error_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([QWEN, "--png", str(tmp_path / "steps.png")]) == 2
    seen = capsys.readouterr()
    assert seen.err == (
        "mok: the plot needs matplotlib, got none; pip install 'mok-megatron[plots]', or leave out "
        "--png\n"
    )
    assert seen.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "mok: the config file must exist, got 'nowhere.yaml'; see configs/"),
        ([QWEN, "--rank", "8"], "mok: an override must be an argument that a plan depends on"),
        ([QWEN, "stray"], "mok: an override must be --KEY VALUE, got 'stray'; see --help"),
        ([QWEN, "--png", "nowhere/x.png"], "mok: the plot must be written to a file"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    seen = capsys.readouterr()
    assert seen.err.startswith(message)
    assert seen.err.count("\n") == 1
    assert seen.out == ""


@pytest.mark.parametrize(
    "wrong", [["--ranks", "0"], ["--ranks", "8,"], ["--machines", "a100"]], ids=" ".join
)
def test_wrong_options_are_usage_errors(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([QWEN, *wrong])
    assert exit_.value.code == 2
    assert "must be" in capsys.readouterr().err


def test_it_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys\nfrom mok_megatron.plan.__main__ import main\n"
        f"main([{QWEN!r}, '--json'])\n"
        "assert not {'torch', 'megatron', 'matplotlib'} & set(sys.modules), 'heavy'"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=CONFIGS.parent,
        check=True,
        capture_output=True,
        timeout=60,
    )


def test_help_explains_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    for word in ("floor", "expected", "exposed", "step", "iteration", "EP", "not a measurement"):
        assert word in out
