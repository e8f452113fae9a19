"""Activation and patches: with the real Megatron in one process, with simulated ones in many.

`plugin_probe.py` is the unmodified script; what it saw is read once. The others are in
`simulated_megatron.py`.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_megatron import ARGUMENTS, CONFIG, IMPORT, LAYER, ROOT, python, run, simulate

MOK = ["--moe-token-dispatcher-type", "mok"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes this checkout an installed package with its entry point."""
    folder = tmp_path_factory.mktemp("site")
    metadata = folder / "mok_megatron-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mok-megatron\nVersion: 0.1.0\n"
    )
    pyproject = (ROOT / "pyproject.toml").read_text()
    section = pyproject.split('[project.entry-points."torch.backends"]\n')[1].split("\n[")[0]
    (metadata / "entry_points.txt").write_text(
        f"[torch.backends]\n{section.replace(chr(34), '')}\n"
    )
    return folder


# ---- the real Megatron, an unmodified script, the entry point


@pytest.fixture(scope="module")
def seen(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    probe = str(ROOT / "tests" / "plugin_probe.py")
    done = run(probe, cwd=tmp_path_factory.mktemp("probe"), path=[installed])
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    failures = [text for name, text in result.items() if name.startswith("failure_of_")]
    assert not failures, "\n".join(failures)
    return result


def test_hook_is_cheap(seen: dict[str, Any]) -> None:
    assert seen["hook_ms"] < 1.0
    assert seen["imports_nothing_of_megatron"]
    assert seen["imports_nothing_of_ours"] == ["mok_megatron"]


def test_command_line(seen: dict[str, Any]) -> None:
    assert seen["mok"] == ["mok", "reference"]
    assert seen["default"] == ["allgather", "auto"]
    assert seen["alltoall"] == "alltoall"
    assert seen["extra"] == 3


def test_command_line_rejects(seen: dict[str, Any]) -> None:
    assert seen["foo"].startswith("exit 2: ")
    assert "--moe-token-dispatcher-type: invalid choice: 'foo'" in seen["foo"]
    assert seen["bad_backend"].startswith("exit 2: ")
    assert "--mok-backend: invalid choice: 'fast'" in seen["bad_backend"]


def test_help(seen: dict[str, Any]) -> None:
    assert seen["help"].startswith("exit 0: ")
    assert "--moe-token-dispatcher-type {allgather,alltoall,flex,mok}" in seen["help"]
    assert "--mok-backend {auto,cuda,reference}" in seen["help"]


def test_validation(seen: dict[str, Any]) -> None:
    assert seen["config_from_args"] == "mok"
    assert seen["fsdp"].startswith("ValueError: mok: parameters cannot be sharded by Megatron-FSDP")
    assert "mok" not in seen["fsdp_with_alltoall"]  # Megatron's own words about its own flag
    assert seen["latent"].startswith("ValueError: mok: ")
    assert seen["dispatcher_foo"] == "ValueError: Unsupported token dispatcher type: foo"


def test_config_keeps_its_manners(seen: dict[str, Any]) -> None:
    assert [seen[how] for how in ("pickle", "deepcopy", "replace")] == ["mok"] * 3
    assert seen["replace_refused"].startswith("ValueError: mok: ")
    literal = "typing.Literal['allgather', 'alltoall', 'flex', 'mok']"
    assert [seen["annotation"], seen["subclass_field"]] == [literal, literal]


def test_modules_keep_their_manners(seen: dict[str, Any]) -> None:
    for name, source in (
        ("config", "transformer_config.py"),
        ("layer", "moe_layer.py"),
        ("arguments", "arguments.py"),
    ):
        assert seen[f"source_of_{name}"] == source
        assert seen[f"lines_of_{name}"] > 100
    kind, state = seen["loader"]
    assert kind == "SourceFileLoader"
    assert set(state) == {"name", "path"}  # nothing of ours is left on it
    assert seen["spec"].endswith("arguments.py")
    assert seen["reloaded"] == "auto"


def test_layers(seen: dict[str, Any]) -> None:
    assert seen["layer_of_foo"] == "MoELayer"
    assert "got Other; use the standard layer spec" in seen["subclass"]


def test_yaml_arguments(seen: dict[str, Any]) -> None:
    assert seen["yaml"] == "mok"
    assert "got moe_latent_size=32" in seen["yaml_refused"]
    assert seen["yaml_backend"] == "reference"
    assert "got use_megatron_fsdp=True" in seen["yaml_fsdp"]


# ---- activation paths


WATCHED = """
import sys, {first}
package = sys.modules.get("mok_megatron")
print("active" if package and package._finder in sys.meta_path else "idle")
"""


@pytest.mark.parametrize(
    ("variables", "verdict"),
    [
        ({}, "active"),
        ({"MOK_MEGATRON_DISABLE": "1"}, "idle"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "idle"),
    ],
    ids=["entry-point", "disabled", "autoload-off"],
)
def test_entry_point(
    installed: Path, tmp_path: Path, variables: dict[str, str], verdict: str
) -> None:
    done = run("-c", WATCHED.format(first="torch"), cwd=tmp_path, path=[installed], **variables)
    assert done.stdout.split() == [verdict], done.stderr
    assert "mok" not in done.stderr


def test_launcher(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WATCHED.format(first="os"))
    done = run("-m", "mok_megatron.launch", "script.py", cwd=tmp_path)
    assert done.stdout.split() == ["active"], done.stderr


def test_a_failing_hook_leaves_torch_alone(installed: Path, tmp_path: Path) -> None:
    code = """
        import sys
        class Full(list):
            def insert(self, *_): raise RuntimeError("no room")
        sys.meta_path = Full(sys.meta_path)
        import torch
        print("torch", torch.ones(1).item())
    """
    done = run("-c", textwrap.dedent(code), cwd=tmp_path, path=[installed])
    assert done.stdout.split() == ["torch", "1.0"], done.stderr
    assert "mok: the dispatcher 'mok' must be added to Megatron" in done.stderr
    assert "RuntimeError('no room')" in done.stderr


# ---- simulated Megatrons


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.0rc0", "0.19.2+d98e8a64"])
def test_known_versions(tmp_path: Path, version: str) -> None:
    simulate(tmp_path, version)
    code = """
        args = arguments.parse_args()
        print(args.moe_token_dispatcher_type, args.mok_backend)
    """
    assert python(tmp_path, code, *MOK) == ("mok auto", "")


MOVED: dict[str, tuple[str, dict[str, tuple[str, str]], str]] = {
    "newer-version": ("0.20.0", {}, "Megatron-Core must be 0.17 to 0.19, got 0.20.0"),
    "older-version": ("0.16.1", {}, "Megatron-Core must be 0.17 to 0.19, got 0.16.1"),
    "no-version": (
        "0.19.2",
        {"megatron/core/package_info.py": ("__version__", "version")},
        "got an unknown version",
    ),
    "other-config": (
        "0.19.2",
        {CONFIG: ("def __post_init__", "def finish")},
        "must have TransformerConfig.__post_init__, got Megatron-Core 0.19.2 without it",
    ),
    "other-field": (
        "0.19.2",
        {CONFIG: ("Literal['allgather', 'alltoall', 'flex']", "str")},
        "must have TransformerConfig.moe_token_dispatcher_type: Literal[...]",
    ),
    "other-route": (
        "0.19.2",
        {LAYER: ("def route", "def choose")},
        "moe.moe_layer must have MoELayer.route, got Megatron-Core 0.19.2 without it",
    ),
    "own-new": (
        "0.19.2",
        {LAYER: ("def route", "def __new__(cls, *a): return object.__new__(cls)\n    def route")},
        "must have MoELayer without a __new__ of its own",
    ),
    "no-dispatcher": (
        "0.19.2",
        {LAYER: ("class MoEAlltoAllTokenDispatcher", "class Dispatcher")},
        "must have MoEAlltoAllTokenDispatcher",
    ),
    "other-validation": (
        "0.19.2",
        {ARGUMENTS: ("def validate_args", "def check_args")},
        "megatron.training.arguments must have validate_args",
    ),
    "strange-config": (
        "0.19.2",
        {CONFIG: ("self.finished = True", "...\n\nTransformerConfig.__annotations__ = None")},
        "must be as mok knows it, got TypeError(",
    ),
}


@pytest.mark.parametrize("case", MOVED.values(), ids=MOVED.keys())
def test_moved_target_is_loud_when_asked_on_the_command_line(
    tmp_path: Path, case: tuple[str, dict[str, tuple[str, str]], str]
) -> None:
    version, changes, words = case
    simulate(tmp_path, version, changes)
    for argv in (MOK, ["--moe-token-dispatcher-type=mok"]):
        output, error = python(tmp_path, "print(arguments.parse_args())", *argv)
        assert output == ""
        assert error.startswith(("RuntimeError: mok: ", "mok: ")), error
        assert words in error
        assert "; install 'megatron-core>=0.17,<0.20' or a mok-megatron" in error
        assert "--moe-token-dispatcher-type alltoall" in error


@pytest.mark.parametrize("case", MOVED.values(), ids=MOVED.keys())
def test_moved_target_is_silent_when_not_asked(
    tmp_path: Path, case: tuple[str, dict[str, tuple[str, str]], str]
) -> None:
    version, changes, _ = case
    simulate(tmp_path, version, changes)
    code = """
        args = arguments.parse_args()
        TransformerConfig(moe_token_dispatcher_type='alltoall', num_moe_experts=4)
        MoELayer(args)
        print(sorted(vars(args)))
    """
    output, error = python(tmp_path, code, "--num-experts", "4")
    assert error == ""
    assert "moe_token_dispatcher_type" in output
    assert "mok" not in output  # no flag of ours on a parser that we do not know


@pytest.mark.parametrize(
    "code",
    [
        "TransformerConfig(moe_token_dispatcher_type='mok', num_moe_experts=4)",
        "from types import SimpleNamespace as N; MoELayer(N(moe_token_dispatcher_type='mok'))",
        "sys.argv += ['--moe-token-dispatcher-type', 'mok']; arguments.parse_args()",
    ],
    ids=["config", "layer", "late-command-line"],
)
@pytest.mark.parametrize("case", ["newer-version", "other-route"])
def test_moved_target_is_loud_when_asked_in_code(tmp_path: Path, case: str, code: str) -> None:
    version, changes, words = MOVED[case]
    simulate(tmp_path, version, changes)
    output, error = python(tmp_path, code)
    assert (output, error.startswith("RuntimeError: mok: ")) == ("", True), error
    assert words in error


def test_rules_run_at_construction(tmp_path: Path) -> None:
    simulate(tmp_path)
    code = "TransformerConfig('mok', num_moe_experts=4, add_bias_linear=True)"
    _, error = python(tmp_path, code)
    assert "mok: experts cannot have biases, got add_bias_linear=True; " in error
    code = "print(TransformerConfig('mok', add_bias_linear=True).finished)"
    assert python(tmp_path, code) == ("True", "")


def test_activation_after_megatron(tmp_path: Path) -> None:
    simulate(tmp_path)
    first = IMPORT.replace("mok_megatron.activate()\n", "") + "mok_megatron.activate()\n"
    code = """
        mok_megatron.activate()
        print(arguments.parse_args().moe_token_dispatcher_type,
              TransformerConfig('mok').finished,
              arguments.add_megatron_arguments.__wrapped__.__name__,
              hasattr(arguments.add_megatron_arguments.__wrapped__, '__wrapped__'))
    """
    expected = "mok True add_megatron_arguments False"  # patched, and once
    assert python(tmp_path, code, *MOK, first=first) == (expected, "")


def test_run_as_a_module(tmp_path: Path) -> None:
    simulate(tmp_path)
    code = """
        import runpy
        runpy.run_module("megatron.training.arguments", run_name="__main__")
    """
    first = "import mok_megatron; mok_megatron.activate()\n"
    output, error = python(tmp_path, code, "--moe-token-dispatcher-type", "flex", first=first)
    assert (output, error) == ("argument module flex", "")


def test_reload_patches_again(tmp_path: Path) -> None:
    simulate(tmp_path)
    code = """
        import importlib
        from megatron.core.transformer import transformer_config
        importlib.reload(transformer_config)
        importlib.reload(arguments)
        print(arguments.parse_args().moe_token_dispatcher_type)
        transformer_config.TransformerConfig('mok', num_moe_experts=4, add_bias_linear=True)
    """
    output, error = python(tmp_path, code, *MOK)
    assert output == "mok"
    assert "experts cannot have biases" in error


def test_own_megakernel_selector(tmp_path: Path) -> None:
    """A newer Megatron with a selector and a flag of the same name as ours."""
    simulate(
        tmp_path,
        changes={
            CONFIG: (
                "add_bias_linear: bool = False",
                "add_bias_linear: bool = False\n    moe_megakernel_backend: Optional[str] = None",
            ),
            ARGUMENTS: (
                "    parser.add_argument('--num-experts', type=int)",
                "    parser.add_argument('--num-experts', type=int)\n"
                "    parser.add_argument('--mok-backend', type=int, default=7)",
            ),
        },
    )
    code = """
        from megatron.training import global_vars
        from mok_megatron import plugin
        global_vars.ARGS = arguments.parse_args()
        print(global_vars.ARGS.mok_backend, plugin.settings().backend)
        TransformerConfig(num_moe_experts=4, moe_megakernel_backend='mok')
        TransformerConfig('mok', num_moe_experts=4, moe_megakernel_backend='mok')
    """
    output, error = python(tmp_path, code, *MOK)
    assert output == "7 auto"
    assert "one selector must choose the MoE kernel" in error
    assert "moe_megakernel_backend=mok; drop one of them" in error


def test_a_broken_package_leaves_megatron_alone(tmp_path: Path) -> None:
    """plugin.py that cannot be imported: a line on stderr, and Megatron as it was."""
    simulate(tmp_path)
    package = tmp_path / "mok_megatron"
    package.mkdir()
    (package / "__init__.py").write_text((ROOT / "mok_megatron" / "__init__.py").read_text())
    (package / "plugin.py").write_text("import a_module_that_is_not_there\n")
    first = f"import sys\nsys.path.remove({str(ROOT)!r})\n" + IMPORT
    output, error = python(tmp_path, "print(TransformerConfig().finished)", first=first)
    assert output == "True"
    assert "mok: the dispatcher 'mok' must be added to Megatron" in error
    assert "a_module_that_is_not_there" in error


# ---- settings


def test_settings(tmp_path: Path) -> None:
    simulate(tmp_path)
    code = """
        from megatron.training import global_vars
        from mok_megatron import plugin
        print(plugin.settings().backend)
        global_vars.ARGS = arguments.parse_args()
        print(plugin.settings().backend)
        settings = plugin.settings()
        print(settings.max_tokens, settings.row_budget, settings.deadline, settings.movers)
    """
    given = ("--mok-backend", "reference", "--mok-max-tokens", "512", "--mok-row-budget", "1.5")
    given += ("--mok-deadline", "7", "--mok-movers", "9")
    assert python(tmp_path, code, *given) == ("auto\nreference\n512 1.5 7 9", "")


def test_settings_of_activate(tmp_path: Path) -> None:
    simulate(tmp_path)
    code = """
        from megatron.training import global_vars
        from mok_megatron import plugin
        mok_megatron.activate(backend="reference")
        mok_megatron.activate(backend="reference")
        mok_megatron.activate()
        global_vars.ARGS = arguments.parse_args()
        print(plugin.settings().backend)
    """
    assert python(tmp_path, code) == ("reference", "")
    output, error = python(tmp_path, code, "--mok-backend", "cuda")
    assert output == ""
    assert "mok: activate() and the --mok-* flags must agree" in error


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("activate(backend='fast')", "ValueError: mok: --mok-backend must be one of auto, cuda"),
        (
            "activate(speed=2)",
            "TypeError: mok: a setting must be one of backend, max_tokens, row_budget, deadline, "
            "movers, ahead, ",
        ),
        (
            "activate(backend='cuda'); mok_megatron.activate(backend='reference')",
            "ValueError: mok: settings must stay as they were given first",
        ),
    ],
    ids=["value", "name", "second"],
)
def test_wrong_settings_are_loud(tmp_path: Path, code: str, words: str) -> None:
    _, error = python(tmp_path, f"mok_megatron.{code}", first="import mok_megatron\n")
    assert error.startswith(words)


def test_explicit_activation_says_when_it_is_disabled(tmp_path: Path) -> None:
    code = "import sys, mok_megatron; mok_megatron.activate(); print(len(sys.meta_path))"
    idle = run("-c", "import sys; print(len(sys.meta_path))", cwd=tmp_path)
    done = run("-c", code, cwd=tmp_path, MOK_MEGATRON_DISABLE="1")
    assert done.stdout == idle.stdout
    assert "mok: activate() does nothing while MOK_MEGATRON_DISABLE=1" in done.stderr
