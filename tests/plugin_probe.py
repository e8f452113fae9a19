"""Run by test_plugin.py in a process of its own: an unmodified script, with mok installed.

It never imports mok_megatron before Megatron knows it. Prints one line of JSON: what it saw.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import io
import json
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.simplefilter("ignore")
seen: dict[str, Any] = {}


def parse(*argv: str, **options: Any) -> Any:
    """Megatron's arguments, or what argparse wrote before it exited."""
    from megatron.training import arguments

    output = io.StringIO()
    sys.argv = ["pretrain.py", *argv]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return arguments.parse_args(**options)
    except SystemExit as stop:
        return f"exit {stop.code}: {' '.join(output.getvalue().split())}"


def error_of(call: Callable[[], Any]) -> str:
    """The error that the call raises, in words; 'accepted' if none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def before_megatron() -> None:
    import torch  # noqa: F401

    seen["imports_nothing_of_megatron"] = not any(m.startswith("megatron") for m in sys.modules)
    seen["imports_nothing_of_ours"] = [m for m in sys.modules if m.startswith("mok_megatron")]
    package = sys.modules["mok_megatron"]
    costs = []
    for _ in range(5):
        sys.meta_path.remove(package._finder)
        start = time.perf_counter()
        package._autoload()
        costs.append(time.perf_counter() - start)
    seen["hook_ms"] = min(costs) * 1e3


MODEL = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --num-experts 4 --moe-ffn-hidden-size 32
    --swiglu --disable-bias-linear --transformer-impl local --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-rope-fusion --no-masked-softmax-fusion --lr 1e-3
    --train-iters 1 --tokenizer-type NullTokenizer --vocab-size 64
"""
MOK = ["--moe-token-dispatcher-type", "mok"]


def command_line() -> None:
    args = parse(*MOK, "--mok-backend", "reference")
    seen["mok"] = [args.moe_token_dispatcher_type, args.mok_backend]
    args = parse()
    seen["default"] = [args.moe_token_dispatcher_type, args.mok_backend]
    seen["alltoall"] = parse("--moe-token-dispatcher-type", "alltoall").moe_token_dispatcher_type
    seen["foo"] = parse("--moe-token-dispatcher-type", "foo")
    seen["bad_backend"] = parse("--mok-backend", "fast")
    seen["help"] = parse("--help")

    def more(parser: Any) -> Any:
        parser.add_argument("--mine", type=int)
        return parser

    seen["extra"] = parse(*MOK, "--mine", "3", extra_args_provider=more).mine


def validation() -> None:
    from megatron.training import arguments
    from megatron.training.argument_utils import core_transformer_config_from_args

    def config(*argv: str) -> Any:
        args = parse(*MODEL.split(), *argv)
        arguments.validate_args(args)
        return core_transformer_config_from_args(args)

    seen["config_from_args"] = config(*MOK).moe_token_dispatcher_type
    seen["fsdp"] = error_of(lambda: config(*MOK, "--use-megatron-fsdp"))
    seen["fsdp_with_alltoall"] = error_of(lambda: config("--use-megatron-fsdp"))
    seen["latent"] = error_of(lambda: config(*MOK, "--moe-latent-size", "32"))


def dataclass_manners() -> None:
    import torch.nn.functional as functional
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.moe import moe_layer
    from megatron.training import arguments

    cls = transformer_config.TransformerConfig
    config = cls(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_ffn_hidden_size=32,
        moe_token_dispatcher_type="mok",
        activation_func=functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
    )
    # Initialisers are closures, which never pickled.
    for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
        setattr(config, name, functional.silu)
    seen["pickle"] = pickle.loads(pickle.dumps(config)).moe_token_dispatcher_type
    seen["deepcopy"] = copy.deepcopy(config).moe_token_dispatcher_type
    seen["replace"] = dataclasses.replace(config, num_layers=3).moe_token_dispatcher_type
    seen["replace_refused"] = error_of(lambda: dataclasses.replace(config, fp8="hybrid"))
    seen["annotation"] = str(cls.__annotations__["moe_token_dispatcher_type"])
    fields = transformer_config.MLATransformerConfig.__dataclass_fields__
    seen["subclass_field"] = str(fields["moe_token_dispatcher_type"].type)

    for name, thing in (
        ("config", cls.__post_init__),
        ("layer", moe_layer.MoELayer),
        ("arguments", arguments.validate_args),
    ):
        source = Path(inspect.getsourcefile(inspect.unwrap(thing)) or "")
        seen[f"source_of_{name}"] = source.name
        seen[f"lines_of_{name}"] = len(inspect.getsource(thing).splitlines())
    seen["loader"] = [type(arguments.__spec__.loader).__name__, vars(arguments.__loader__)]
    seen["spec"] = importlib.util.find_spec("megatron.training.arguments").origin
    importlib.reload(arguments)
    seen["reloaded"] = parse(*MOK).mok_backend

    class Other(moe_layer.MoELayer):
        pass

    seen["subclass"] = error_of(lambda: Other.__new__(Other, config))
    config.moe_token_dispatcher_type = "foo"
    seen["layer_of_foo"] = type(moe_layer.MoELayer.__new__(moe_layer.MoELayer, config)).__name__
    nobody = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    submodules = SimpleNamespace(router=lambda **_: None)
    seen["dispatcher_foo"] = error_of(
        lambda: moe_layer.MoELayer(
            config,
            submodules,
            layer_number=1,
            pg_collection=SimpleNamespace(ep=nobody, tp=nobody, cp=nobody, expt_tp=nobody),
        )
    )


def yaml_arguments() -> None:
    import yaml
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training import global_vars
    from megatron.training.yaml_arguments import core_transformer_config_from_yaml

    values = {}
    for field in dataclasses.fields(TransformerConfig):
        default = field.default
        values[field.name] = default if isinstance(default, int | float | str) else None
    values |= {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 32,
        "moe_token_dispatcher_type": "mok",
        "activation_func": "swiglu",
        "bias_swiglu_fusion": False,
        "add_bias_linear": False,
        "offload_modules": [],
        "params_dtype": "float32",
    }

    def load(**changes: Any) -> Any:
        language_model = values | changes
        tree = {
            "language_model": language_model,
            "model_parallel": {"overlap_p2p_comm": language_model.pop("overlap_p2p_comm")},
            "disable_msc_deprecated": False,
            "enable_msc": False,
            "mok_backend": "reference",
        }
        path = Path("model.yaml")
        path.write_text(yaml.safe_dump(tree))
        return parse("--yaml-cfg", str(path))

    args = load()
    seen["yaml"] = core_transformer_config_from_yaml(args).moe_token_dispatcher_type
    args = load(moe_latent_size=32)
    seen["yaml_refused"] = error_of(lambda: core_transformer_config_from_yaml(args))

    # What megatron.training makes of it and shows to the rest of the program.
    args = load()
    args = SimpleNamespace(**vars(args), **vars(args.language_model), num_experts=4)
    global_vars.set_args(args)
    from mok_megatron import plugin

    seen["yaml_backend"] = plugin.settings().backend
    args.use_megatron_fsdp = True
    seen["yaml_fsdp"] = error_of(lambda: core_transformer_config_from_yaml(load()))


if __name__ == "__main__":
    before_megatron()
    for step in (command_line, validation, dataclass_manners, yaml_arguments):
        try:
            step()
        except Exception:
            seen[f"failure_of_{step.__name__}"] = traceback.format_exc()
    print(json.dumps(seen, default=str))
