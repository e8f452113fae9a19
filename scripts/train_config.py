"""A config file and the command line -> how to launch, and Megatron's arguments.

The file is YAML: one key per Megatron argument, without the dashes in front, and a section `launch`
for what Megatron does not know. `true` sets a flag, `false` leaves it out (or sets its --no-… form
where Megatron has one), a list is several values. An argument on the command line replaces the
file's.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml


class UserError(Exception):
    """Something the user can set right; the message is the one line they read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What is started on this machine, unless torchrun has started it already."""

    device: str = "cuda"
    processes: int = 1
    port: int | None = None  # rendezvous port on this machine; None: any free one


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: `arguments` maps Megatron's argument names, with dashes, to values."""

    path: Path
    launch: Launch
    arguments: dict[str, Any]

    def replace(self, arguments: dict[str, Any]) -> RunConfig:
        return dataclasses.replace(self, arguments={**self.arguments, **arguments})

    def relaunch(self, launch: dict[str, Any]) -> RunConfig:
        """With values of the launch section from the command line."""
        section = {**dataclasses.asdict(self.launch), **launch}
        return dataclasses.replace(self, launch=_read_launch(self.path, section))


def read_config(path: Path) -> RunConfig:
    """Raises UserError for a file that is missing, no YAML mapping, or has a wrong launch
    section."""
    if not path.is_file():
        raise UserError(f"mok: the config file must exist, got {str(path)!r}; see configs/")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise UserError(f"mok: {path} must be YAML, got an error: {where}; see configs/") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(
            f"mok: {path} must map Megatron's argument names to values, got "
            f"{type(content).__name__}; see configs/"
        )
    launch = _read_launch(path, content.pop("launch", {}))
    return RunConfig(
        path=path, launch=launch, arguments={_dashed(k): v for k, v in content.items()}
    )


def _read_launch(path: Path, section: Any) -> Launch:
    known = {field.name for field in dataclasses.fields(Launch)}
    if not isinstance(section, dict):
        raise UserError(f"mok: launch in {path} must be a section, got {section!r}; see configs/")
    for key in section:
        if key not in known:
            raise UserError(_unknown(key, known, f"the launch section of {path}"))
    launch = Launch(**section)
    if launch.device not in ("cpu", "cuda"):
        raise UserError(
            f"mok: launch device must be cpu or cuda, got {launch.device!r}; edit {path}"
        )
    if type(launch.processes) is not int or launch.processes < 1:
        raise UserError(
            f"mok: launch processes must be a number above 0, got {launch.processes!r}; edit {path}"
        )
    if launch.port is not None and not (type(launch.port) is int and 0 < launch.port < 65536):
        raise UserError(
            f"mok: launch port must be a number from 1 to 65535, got {launch.port!r}; edit {path}"
        )
    return launch


def read_overrides(tokens: list[str]) -> dict[str, Any]:
    """`--key value …`, `--key=value` and `--flag` -> arguments; values are read as in the file."""
    arguments: dict[str, Any] = {}
    key: str | None = None
    for token in tokens:
        if token.startswith("--"):
            key, equals, value = token[2:].partition("=")
            key = _dashed(key)
            arguments[key] = [_value(value)] if equals else []
        elif key is None:
            raise UserError(
                f"mok: an override must start with --, got {token!r}; write --KEY VALUE"
            )
        else:
            arguments[key].append(_value(token))
    return {k: True if not v else v[0] if len(v) == 1 else v for k, v in arguments.items()}


def _value(token: str) -> Any:
    return {"true": True, "false": False}.get(token, token)


def to_argv(arguments: dict[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    """The arguments as Megatron's command line; `parser` is Megatron's.

    Raises UserError for a key that Megatron does not have, naming the nearest that it has.
    """
    actions = {
        _dashed(option[2:]): (option, action)
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and action.dest != "help"
    }
    argv: list[str] = []
    for key, value in arguments.items():
        off = actions.get(f"no-{key}")
        if value is False and off is not None:
            argv.append(off[0])
            continue
        if key not in actions:
            raise UserError(_unknown(key, actions, "Megatron's arguments"))
        option, action = actions[key]
        if value is None or value is False:
            continue
        if value is True and action.nargs == 0:
            argv.append(option)
        elif action.nargs == 0:
            raise UserError(f"mok: {key} must be true or false, got {value!r}; it is a flag")
        elif isinstance(value, list) and action.nargs is not None:
            argv += [option, *map(str, value)]
        else:
            argv += [option, str(value)]
    return argv


class OneLineParser(argparse.ArgumentParser):
    """Its errors are a UserError instead of 400 lines of usage and an exit."""

    def error(self, message: str) -> Any:
        raise UserError(f"mok: Megatron's arguments must parse, got: {message}; see its --help")


def check_dataset(arguments: dict[str, Any]) -> None:
    """Raises UserError for a `data-path` whose files are not there. Values may be weights and
    prefixes in turn."""
    value = arguments.get("data-path")
    for prefix in value if isinstance(value, list) else [] if value is None else [value]:
        missing = [
            f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").is_file()
        ]
        if missing and not _is_number(prefix):
            raise UserError(
                f"mok: the dataset files must exist, got no {' and no '.join(missing)}; "
                "--data-path takes the path of a Megatron dataset without .bin or .idx"
            )


def check_experts(arguments: dict[str, Any]) -> None:
    """Raises UserError when the ranks cannot share the experts evenly."""
    experts, ranks = (
        int(str(arguments.get(key) or 1)) if str(arguments.get(key) or 1).isdigit() else 1
        for key in ("num-experts", "expert-model-parallel-size")
    )
    if ranks < 1 or experts % ranks:
        raise UserError(
            "mok: num-experts must be a multiple of expert-model-parallel-size, got "
            f"{experts} and {ranks}; change one of them"
        )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _unknown(key: Any, known: Iterable[str], where: str) -> str:
    near = difflib.get_close_matches(str(key), list(known), n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]!r}?" if near else "remove it"
    return f"mok: every key must be one of {where}, got {key!r}; {remedy}"


def _dashed(key: str) -> str:
    return key.replace("_", "-")
