import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from holdfast import config
from holdfast.cli.usage import NO_VARIABLES
from holdfast.config import EngineConfig, UpstreamConfig
from holdfast.errors import ConfigError


def _load(**sources: object) -> EngineConfig:
    return config.load(EngineConfig, **({"flags": {}, "environment": {}} | sources))  # type: ignore[arg-type]


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text('sink = 1\nrecent = 10\nmax-pin = 100\ndtype = "float32"\n')
    environment = {"HOLDFAST_RECENT": "20", "HOLDFAST_MAX_PIN": "200", "HOLDFAST_OTHER": "x"}
    loaded = _load(file=file, environment=environment, flags={"max_pin": 300, "dtype": None})
    assert (loaded.sink, loaded.recent, loaded.max_pin, loaded.dtype) == (1, 20, 300, "float32")


def test_several_upstreams_are_flags_a_list_or_commas(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text('upstream = ["http://a", "http://b"]')
    parser = argparse.ArgumentParser()
    config.add_flags(parser, UpstreamConfig)
    for flags, variables, path in (
        (["--upstream", "http://a", "--upstream", "http://b"], {}, None),
        ([], {"HOLDFAST_UPSTREAM": "http://a, http://b,"}, None),
        ([], {}, file),
    ):
        arguments = vars(parser.parse_args(flags))
        loaded = config.load(UpstreamConfig, flags=arguments, environment=variables, file=path)
        assert loaded.upstreams == ("http://a", "http://b")
    file.write_text("upstream = [1]")
    with pytest.raises(ConfigError, match="must be text"):
        config.load(UpstreamConfig, flags={}, environment={}, file=file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("recnt = 3", "unknown key 'recnt'.*did you mean recent"),
        ("zzz = 3", "unknown key 'zzz' in"),
        ('recent = "many"', "recent in .* must be a whole number, got 'many'"),
        ("recent = 1.5", "must be a whole number"),
        ("recent = true", "must be a whole number"),
        ("device = 3", "must be text"),
        ('device = "tpu"', "must be one of auto, cpu, cuda"),
        ("= 3", "is not TOML"),
    ],
)
def test_a_wrong_file_is_one_clear_sentence(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        _load(file=file)


@pytest.mark.parametrize("flags", [{"max_batch": 0}, {"sessions": -1}, {"prefill_chunk": 0}, {"sink": -1}])
def test_numbers_out_of_range_are_refused_by_name(flags: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(flags))):
        _load(flags=flags)
    for name in ("idle_ttl_s", "drain_s"):
        for value in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ConfigError, match=name):
                config.load(config.ServeConfig, flags={name: value}, environment={})


def test_a_missing_file_and_a_wrong_variable_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file"):
        _load(file=tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="HOLDFAST_SINK must be a whole number, got 'four'"):
        _load(environment={"HOLDFAST_SINK": "four"})


def test_the_help_names_what_a_setting_takes() -> None:
    fields = {field.name: field for cls in config.GROUPS for field in dataclasses.fields(cls)}
    metavars = {name: config.metavar_of(field) for name, field in fields.items()}
    wanted = {"grpc": "HOST:PORT", "keys_file": "FILE", "tls_key": "FILE", "data_dir": "DIR", "idle_ttl_s": "SECONDS"}
    wanted |= {"max_body_mb": "MB", "recent": "TOKENS", "upstream": "URL", "upstream_extra": "JSON", "sessions": "N"}
    assert {name: metavars[name] for name in wanted} == wanted
    vague = [name for name, field in fields.items() if metavars[name] == "TEXT" and not field.metadata["choices"]]
    assert not vague, "pass option(..., metavar=...) for these"


def test_every_variable_that_the_project_reads_is_known() -> None:
    root = Path(__file__).parents[1]
    files = [root / "Makefile", *(root / "src").rglob("*.py"), *(root / "docs").rglob("*.md")]
    files += [file for kind in ("py", "ts", "md") for file in (root / "sdks").rglob(f"*.{kind}")]
    texts = [file.read_text(encoding="utf-8") for file in files if "node_modules" not in file.parts]
    named = {name for text in texts for name in re.findall(r"\bHOLDFAST_[A-Z_]*[A-Z]\b", text)}
    assert len(named) > 5
    assert named - NO_VARIABLES.keys() <= config.VARIABLES
