"""The patches that teach an unmodified Megatron the dispatcher `mok`.

Four of Megatron's modules are patched right after they are executed, or at once if they are there
already:

    transformer_config   'mok' among the dispatchers; the rules of `config` at every construction
    moe_layer            MoELayer(config with 'mok') makes a MokMoELayer, whoever calls it
    training.arguments   'mok' among the choices, --mok-*, the rules on arguments
    training.training    a run that logs an iteration also logs its mok layers (`observe`)

A Megatron of unknown version, or one in which a target has moved, is left alone: its choices and
flags stay its own. Asking it for mok all the same (on the command line, in a config, by building a
layer) raises RuntimeError that names version, target and remedy.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import sys
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

if TYPE_CHECKING:
    from mok_megatron.config import MokConfig

_FLAG = "--moe-token-dispatcher-type"
KNOWN_VERSIONS = re.compile(r"0\.(17|18|19)(\D|$)")
_REMEDY = (
    "install 'megatron-core>=0.17,<0.20' or a mok-megatron that knows this version, "
    f"or use {_FLAG} alltoall"
)

_configured: MokConfig | None = None  # what activate() was given
_foreign_flags: set[str] = set()  # fields of MokConfig whose --mok-* flag is somebody else's
_refusals: list[str] = []  # why this Megatron cannot run mok


class _TargetMoved(Exception):
    """Something that a patch needs is not where it was."""


def configure(**fields: Any) -> None:
    """Set the fields of MokConfig for this process, once.

    Raises ValueError (TypeError for an unknown field) when they are wrong, or differ from those
    given before.
    """
    global _configured
    from mok_megatron.config import MokConfig

    try:
        given = MokConfig(**fields)
    except TypeError:
        known = ", ".join(MokConfig.__dataclass_fields__)
        raise TypeError(
            f"mok: a setting must be one of {known}, got {', '.join(fields)}; check its name"
        ) from None
    if _configured not in (None, given):
        raise ValueError(
            f"mok: settings must stay as they were given first, {_configured}, got {given}; "
            "call activate() with settings once"
        )
    _configured = given


def settings() -> MokConfig:
    """What activate() was given, else the --mok-* flags of megatron.training, else the defaults.

    Raises ValueError when activate() and a flag both say something, and not the same.
    """
    from mok_megatron.config import MokConfig

    arguments = training_arguments()
    flags = MokConfig(
        **{
            name: getattr(arguments, f"mok_{name}")
            for name in MokConfig.__dataclass_fields__
            if name not in _foreign_flags and hasattr(arguments, f"mok_{name}")
        }
    )
    if _configured is None:
        return flags
    if flags not in (MokConfig(), _configured):
        raise ValueError(
            f"mok: activate() and the --mok-* flags must agree, got {_configured} and {flags}; "
            "drop one of them"
        )
    return _configured


def patch(module: Any) -> None:
    """Patch one of the targets, or remember why that is impossible.

    Raises RuntimeError when it is, and the command line asks for mok.
    """
    version = _megatron_version()
    if not KNOWN_VERSIONS.match(version):
        _refuse(f"mok: Megatron-Core must be 0.17 to 0.19, got {version}; {_REMEDY}")
    try:
        _PATCHES[module.__name__](module)
    except _TargetMoved as moved:
        _refuse(
            f"mok: {module.__name__} must have {moved}, got Megatron-Core {version} without it; "
            f"{_REMEDY}"
        )
    except Exception as error:
        _refuse(
            f"mok: {module.__name__} must be as mok knows it, got {error!r} while patching "
            f"Megatron-Core {version}; {_REMEDY}"
        )


def _refuse(why: str) -> None:
    if why not in _refusals:
        _refusals.append(why)
    if _command_line_asks():
        _raise_refusals()


def _raise_refusals() -> NoReturn:
    raise RuntimeError("\n".join(_refusals))


def _asks(config: Any) -> bool:
    return getattr(config, "moe_token_dispatcher_type", None) == "mok"


def _command_line_asks() -> bool:
    return f"{_FLAG}=mok" in sys.argv or (_FLAG, "mok") in itertools.pairwise(sys.argv)


def _megatron_version() -> str:
    """In Megatron's own words: the metadata of an installed wheel may hide a source checkout."""
    import importlib

    try:
        return str(importlib.import_module("megatron.core.package_info").__version__)
    except (ImportError, AttributeError):
        return "an unknown version"


def training_arguments() -> Any:
    """megatron.training's arguments; None where it is not used, or not initialised yet."""
    module = sys.modules.get("megatron.training.global_vars")
    try:
        return None if module is None else module.get_args()
    except (AssertionError, AttributeError):
        return None


def _target(module: Any, path: str) -> Any:
    found = module
    for name in path.split("."):
        if not hasattr(found, name):
            raise _TargetMoved(path)
        found = getattr(found, name)
    return found


def _patch_config(module: Any) -> None:
    """The rules, and 'mok' in the field's Literal, where argparse takes its choices from."""
    cls = _target(module, "TransformerConfig")
    original = _target(module, "TransformerConfig.__post_init__")

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        asked = _asks(self)
        if asked:
            _check(self)
            from mok_megatron.config import already_done

            self.mok_already_done = already_done(self)
            self.moe_shared_expert_overlap = False  # Megatron knows it for two dispatchers only
        original(self)
        if asked:  # again: Megatron has filled in defaults and translated deprecated fields
            _check(self)

    cls.__post_init__ = __post_init__
    field = _target(module, "TransformerConfig.__dataclass_fields__").get(
        "moe_token_dispatcher_type"
    )
    if field is None or get_origin(field.type) is not Literal:
        raise _TargetMoved("TransformerConfig.moe_token_dispatcher_type: Literal[...]")
    if not _refusals:  # subclasses inherit the annotation and share the Field object
        dispatchers: Any = Literal[(*get_args(field.type), "mok")]
        cls.__annotations__["moe_token_dispatcher_type"] = dispatchers
        field.type = dispatchers


def _check(config: Any) -> None:
    if _refusals:
        _raise_refusals()
    from mok_megatron.config import check, check_arguments

    check(config)
    check_arguments(training_arguments())  # seen here too when they come from YAML


def _patch_moe_layer(module: Any) -> None:
    """MoELayer.__new__: one attribute, whatever name or spec the layer is built through."""
    cls = _target(module, "MoELayer")
    if cls.__new__ is not object.__new__:
        raise _TargetMoved("MoELayer without a __new__ of its own")
    if hasattr(sys.modules.get("mok_megatron.layer"), "MokMoELayer"):  # not while it is importing
        del sys.modules["mok_megatron.layer"]  # after a reload its classes have new bases

    def __new__(actual: Any, *args: Any, **kwargs: Any) -> Any:
        if _asks(kwargs.get("config", args[0] if args else None)):
            if _refusals:
                _raise_refusals()
            from mok_megatron.layer import MokMoELayer

            if actual is cls:
                actual = MokMoELayer
            elif not issubclass(actual, MokMoELayer):
                raise TypeError(
                    "mok: an MoE layer must be Megatron's MoELayer or a subclass of MokMoELayer, "
                    f"got {actual.__name__}; use the standard layer spec, or {_FLAG} alltoall"
                )
        return object.__new__(actual)

    cls.__new__ = staticmethod(__new__)
    for name in ("route", "shared_experts_compute", "forward"):
        _target(module, f"MoELayer.{name}")
    _target(module, "MoEAlltoAllTokenDispatcher")


def _patch_arguments(module: Any) -> None:
    """Every parser that Megatron makes, whichever script asks for it, and the rules."""
    add_arguments = _target(module, "add_megatron_arguments")
    validate = _target(module, "validate_args")

    @functools.wraps(add_arguments)
    def add_megatron_arguments(parser: Any) -> Any:
        parser = add_arguments(parser)
        if not _refusals:
            _extend_parser(parser)
        elif _command_line_asks():
            _raise_refusals()
        return parser

    @functools.wraps(validate)
    def validate_args(args: Any, *rest: Any, **named: Any) -> Any:
        from mok_megatron.config import check_arguments

        check_arguments(args)
        return validate(args, *rest, **named)

    module.add_megatron_arguments = add_megatron_arguments
    module.validate_args = validate_args


# Fields of MokConfig -> what argparse is told of their flags.
_FLAGS: dict[str, dict[str, Any]] = {
    "backend": {
        "help": "What computes the MoE layers. cuda: the fused kernel; reference: plain torch, on "
        "any device; auto: cuda for CUDA tensors, reference for CPU tensors.",
    },
    "max_tokens": {
        "type": int,
        "metavar": "T",
        "help": "The most tokens that a rank brings to an MoE layer of the cuda backend with "
        "expert parallelism. Default: sequence length x micro-batch size / (TP x CP).",
    },
    "row_budget": {
        "type": float,
        "metavar": "X",
        "help": "Rows that a rank's buffers of the cuda backend hold at once with expert "
        "parallelism, as a multiple of the balanced share. More rows take them in turn, expert by "
        "expert, with the same results, but time for waiting and for computing gate and up again.",
    },
    "deadline": {
        "type": int,
        "metavar": "S",
        "help": "Seconds that a call of the cuda backend with expert parallelism waits for another "
        "rank before it ends with an error.",
    },
    "movers": {
        "type": int,
        "metavar": "N",
        "help": "CTAs of the cuda backend that move rows between ranks, beside their matrix work; "
        "fewer leave more of the links to others. Default: 0, all.",
    },
    "ahead": {
        "type": int,
        "metavar": "N",
        "help": "Experts whose first product the cuda backend computes before the first expert's "
        "second: more hide a slower link, fewer use the cache better. Default: 0, chosen.",
    },
}


def _extend_parser(parser: Any) -> None:
    from mok_megatron.config import BACKENDS, MokConfig

    for action in parser._actions:
        if action.dest == "moe_token_dispatcher_type" and "mok" not in (action.choices or ("mok",)):
            action.choices = (*action.choices, "mok")
        _repair_help(action)
    ours = parser.add_argument_group("mok", f"Read with {_FLAG} mok.")
    for name, options in _FLAGS.items():
        flag = f"--mok-{name.replace('_', '-')}"
        if flag in parser._option_string_actions:
            _foreign_flags.add(name)
        else:
            choices = BACKENDS if name == "backend" else None
            ours.add_argument(flag, **options, choices=choices, default=getattr(MokConfig, name))


def _repair_help(action: Any) -> None:
    """0.19 has a bare '%' in a help text, on which --help dies before it can show anything."""
    try:
        _ = (action.help or "") % {**vars(action), "prog": ""}
    except (ValueError, TypeError, KeyError):
        action.help = action.help.replace("%", "%%")


def _patch_training(module: Any) -> None:
    """training_log: what `observe` saw, after Megatron's own."""
    original = _target(module, "training_log")
    signature = inspect.signature(original)
    if "iteration" not in signature.parameters:
        raise _TargetMoved("training_log(iteration)")

    @functools.wraps(original)
    def training_log(*positional: Any, **named: Any) -> Any:
        result = original(*positional, **named)
        arguments = training_arguments()
        if _asks(arguments) and arguments.num_experts:
            from mok_megatron import observe

            observe.report(signature.bind(*positional, **named).arguments["iteration"], arguments)
        return result

    module.training_log = training_log


_PATCHES = {
    "megatron.core.transformer.transformer_config": _patch_config,
    "megatron.core.transformer.moe.moe_layer": _patch_moe_layer,
    "megatron.training.arguments": _patch_arguments,
    "megatron.training.training": _patch_training,
}
