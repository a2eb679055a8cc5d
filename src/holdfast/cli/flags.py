"""Settings as command-line flags, one group per settings class."""

import argparse
import dataclasses
import os
from collections.abc import Container
from pathlib import Path
from typing import Any, TypeVar

from holdfast import config

C = TypeVar("C")

_CLASSES = (config.ChatConfig, config.EngineConfig, config.ServeConfig, config.UpstreamConfig)
_ALL = {field.name for cls in _CLASSES for field in dataclasses.fields(cls)}


def add_flags(parser: argparse.ArgumentParser, cls: type[Any], title: str, *, without: Container[str] = ()) -> None:
    """A flag for every field not in `without`; its help names the default and the environment variable."""
    if not any(action.dest == "config" for action in parser._actions):
        parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML; flags and environment win")
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(cls):
        if (name := field.name) in without:
            continue
        names = ("--" + name.replace("_", "-"), *field.metadata["aliases"])
        about = f"{field.metadata['help']} (default: {field.default}; {config.ENVIRONMENT_PREFIX}{name.upper()})"
        if isinstance(field.default, bool):
            group.add_argument(*names, action=argparse.BooleanOptionalAction, default=None, help=about)
            continue
        group.add_argument(
            *names,
            dest=name,
            type=type(field.default),
            choices=field.metadata["choices"],
            metavar=None if field.metadata["choices"] else "TEXT" if isinstance(field.default, str) else "N",
            help=about,
        )


def settings(cls: type[C], arguments: argparse.Namespace) -> C:
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(arguments).items() if name in names}
    return config.load(cls, flags=given, environment=os.environ, file=arguments.config, others=_ALL)
