"""`holdfast bench`: run benchmark scenarios on this machine, check their gates, compare two reports."""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.bench import (
    beside_servers,
    capacity,
    engine_speed,
    long_session,
    mismatch,
    overhead,
    quality,
    recovery,
    responsiveness,
    resting,
    speculation,
)
from holdfast.bench.cluster import scale
from holdfast.bench.cluster import scenario as cluster
from holdfast.bench.report import Figure, Verdict, cautions, compare, read
from holdfast.bench.runner import RESULTS, Output, Scenario, quick_note, run
from holdfast.config import flag_of, metavar_of
from holdfast.engine.factory import build_engine
from holdfast.errors import ConfigError

SCENARIOS = (
    responsiveness.SCENARIO,
    overhead.SCENARIO,
    long_session.SCENARIO,
    recovery.SCENARIO,
    cluster.SCENARIO,
    scale.SCENARIO,
    capacity.SCENARIO,
    resting.SCENARIO,
    quality.scenario(build_engine),
    beside_servers.SCENARIO,
    engine_speed.DECODE,
    engine_speed.PREFILL,
    speculation.SCENARIO,
    mismatch.SCENARIO,
)

_COMMANDS = {long_session.SCENARIO.name: long_session.commands}  # for a server that the user starts

_COLOURS: dict[Verdict, str] = {"better": "green", "worse": "red", "changed": "yellow"}


def register(commands: Any) -> None:
    parser = commands.add_parser("bench", description=__doc__)
    actions = parser.add_subparsers(title="scenarios", required=True, metavar="NAME")
    for scenario in SCENARIOS:
        _add(actions, scenario)
    listing = actions.add_parser("list", help="list all scenarios")
    listing.set_defaults(run=_list)
    comparing = actions.add_parser("compare", help="compare two reports: what is better, worse, or within noise")
    comparing.add_argument("before", type=Path, metavar="A", help="a JSON report")
    comparing.add_argument("after", type=Path, metavar="B", help="a later report of the same scenario")
    comparing.set_defaults(run=_compare)


def _add(actions: Any, scenario: Scenario) -> None:
    parser = actions.add_parser(
        scenario.name,
        help=scenario.about,
        description=f"{scenario.about}. Exits with 1 if a gate fails; after Ctrl-C the results so far are kept.",
    )
    parser.add_argument("--quick", action="store_true", help=quick_note(scenario))
    parser.add_argument(
        "--output", type=Path, default=RESULTS, metavar="DIR", help="for reports and plots (default: %(default)s)"
    )
    parser.add_argument(
        "--json", default="", metavar="FILE", help="also write the report here; -: to stdout, and nothing else"
    )
    if scenario.name in _COMMANDS:
        about = "only print the commands for two terminals, one for the server"
        parser.add_argument("--print-commands", action="store_true", help=about)
    group = parser.add_argument_group("settings")
    for field in dataclasses.fields(scenario.settings):
        quick = scenario.quick.get(field.name)
        about = f"{field.metadata['help']} (default: {field.default}{'' if quick is None else f'; quick: {quick}'})"
        group.add_argument(flag_of(field.name), type=type(field.default), metavar=metavar_of(field), help=about)
    parser.set_defaults(run=lambda arguments: _run(scenario, arguments))


def _run(scenario: Scenario, arguments: argparse.Namespace) -> int:
    values = dict(scenario.quick) if arguments.quick else {}
    for field in dataclasses.fields(scenario.settings):
        if (given := getattr(arguments, field.name)) is None:
            continue
        least = field.metadata["least"]
        if not isinstance(given, str) and not least <= given < math.inf:
            raise ConfigError(f"{field.name} must be {least} or more, got {given}")
        values[field.name] = given
    settings = scenario.settings(**values)
    if scenario.name in _COMMANDS and arguments.print_commands:
        print(_COMMANDS[scenario.name](settings))
        return 0
    return run(scenario, settings, Output(arguments.output, arguments.json), is_quick=arguments.quick)


def _list(arguments: argparse.Namespace) -> int:
    table = Table("scenario", "description", box=None)
    for scenario in SCENARIOS:
        table.add_row(scenario.name, scenario.about)
    Console().print(table)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    before, after = read(arguments.before), read(arguments.after)
    table = Table("figure", "A", "B", "B / A", "verdict", "unit", box=None)
    for one in compare(before, after):
        colour = _COLOURS.get(one.verdict, "dim")
        said = f"[{colour}]{one.verdict}[/]"
        table.add_row(one.name, _shown(one.before), _shown(one.after), f"{one.ratio:.3g}", said, one.before.unit)
    console = Console(highlight=False)
    for caution in cautions(before, after):
        console.print(caution, style="yellow", markup=False, soft_wrap=True)
    console.print(table)
    return 0


def _shown(figure: Figure) -> str:
    found = figure.summary
    return f"{found.median:.4g} ({found.low:.4g} to {found.high:.4g})" if found else ""
