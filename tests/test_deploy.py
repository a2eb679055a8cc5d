"""deploy/: every file parses, and flags, ports, paths and metrics in it are those that Holdfast has."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli import serve
from holdfast.config import GROUPS, ServeConfig, from_arguments, load
from holdfast.metrics import Metrics
from holdfast.serving.http.middleware import OPEN_PATHS
from holdfast.serving.keys import split_address
from tests.test_packaging import flaw_of

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
DOCUMENTS = [
    document
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
HTTP, GRPC = (split_address(getattr(ServeConfig(), name))[1] for name in ("http", "grpc"))


def kubernetes(kind: str, name: str) -> Any:
    (found,) = [each for each in DOCUMENTS if each["kind"] == kind and each["metadata"]["name"] == name]
    return found["spec"]


MEMBER = kubernetes("StatefulSet", "holdfast")["template"]["spec"]
CONTAINER = MEMBER["containers"][0]
COMMANDS = {"kubernetes": CONTAINER["args"]} | {
    name: service["command"] for name, service in COMPOSE.items() if name.startswith("member")
}


def steps(word: str) -> list[str]:
    """What follows an instruction of the Dockerfile, each time that it is there."""
    return re.findall(rf"^{word} (.*)$", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_flags_of_a_member_are_flags_of_ours_with_values_that_fit(name: str) -> None:
    command, *words = COMMANDS[name]
    assert command == "serve"
    arguments = serve.parsed(words, prog="holdfast serve")
    server, *_ = (from_arguments(cls, arguments) for cls in GROUPS)
    assert split_address(server.http)[1] == HTTP
    assert split_address(server.grpc)[1] == GRPC
    assert server.keys_file
    assert server.member
    assert server.advertise.startswith(server.member)


def test_members_of_compose_are_named_as_their_services_and_prometheus_reads_them_all() -> None:
    members = {name for name in COMPOSE if name.startswith("member")}
    assert len(members) == 2
    for name in members:
        assert f"--advertise={name}" in COMPOSE[name]["command"]
        assert COMPOSE[name]["depends_on"]["postgres"]["condition"] == "service_healthy"
        assert {port.rpartition(":")[2] for port in COMPOSE[name]["ports"]} == {str(HTTP), str(GRPC)}
        assert int(COMPOSE[name]["stop_grace_period"].removesuffix("s")) > ServeConfig().drain_s + 20
    assert all(port.startswith("127.0.0.1:") for service in COMPOSE.values() for port in service.get("ports", ()))
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert set(job["static_configs"][0]["targets"]) == {f"{name}:{HTTP}" for name in members}
    assert job["metrics_path"] in OPEN_PATHS


def test_files_that_compose_mounts_are_there_and_secrets_are_not() -> None:
    ignored = (DEPLOY / ".gitignore").read_text().split()
    mounts = {mount.split(":")[0] for service in COMPOSE.values() for mount in service.get("volumes", ())}
    for mount in (mount for mount in mounts if mount.startswith("./")):
        assert (DEPLOY / mount).exists() != (mount.removeprefix("./") in ignored), mount
    for path in (DEPLOY / "grafana/provisioning").rglob("*.yaml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file() and path.name not in ignored]
    assert not [found for text in texts for found in re.findall(r"postgres(?:ql)?://\w+:\S+@", text)]


def test_probes_ask_what_the_server_answers_on_the_port_that_it_has() -> None:
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert ports == {"http": HTTP, "grpc": GRPC}
    probes = [CONTAINER[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [(probe["path"], probe["port"]) for probe in probes] == [
        ("/healthz", "http"),
        ("/healthz", "http"),
        ("/readyz", "http"),
    ]
    assert {probe["path"] for probe in probes} <= set(OPEN_PATHS)
    for name in ("holdfast", "holdfast-members"):
        service = kubernetes("Service", name)
        assert {port["name"]: port["port"] for port in service["ports"]} == ports


def test_a_pod_has_time_to_drain_and_a_name_that_members_reach() -> None:
    spec = kubernetes("StatefulSet", "holdfast")
    server = from_arguments(ServeConfig, serve.parsed(CONTAINER["args"][1:], prog="holdfast serve"))
    wait = float(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert MEMBER["terminationGracePeriodSeconds"] >= wait + server.drain_s + 20
    assert f"--advertise=$(POD_NAME).{spec['serviceName']}" in CONTAINER["args"]
    labels = spec["template"]["metadata"]["labels"]
    assert labels == spec["selector"]["matchLabels"] == kubernetes("Service", "holdfast")["selector"]
    assert kubernetes("PodDisruptionBudget", "holdfast")["selector"]["matchLabels"] == labels


def test_secrets_of_kubernetes_are_those_that_its_first_lines_create() -> None:
    text = (DEPLOY / "kubernetes/kustomization.yaml").read_text()
    made = set(re.findall(r"--from-(?:file|literal)=([\w-]+)=", text))

    def keys(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if "secretKeyRef" in value:
                yield value["secretKeyRef"]["key"]
            yield from (item["key"] for item in value["items"]) if "secretName" in value else ()
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from keys(each)

    assert set(keys(DOCUMENTS)) == made
    (kustomization,) = [each for each in DOCUMENTS if each["kind"] == "Kustomization"]
    assert all((DEPLOY / "kubernetes" / name).is_file() for name in kustomization["resources"])
    assert kustomization["images"][0]["name"] == CONTAINER["image"] == COMPOSE["member-a"]["image"]


def test_the_image_is_built_from_what_is_there_and_does_not_run_as_root() -> None:
    copied = [word for line in steps("COPY") if "--from" not in line for word in shlex.split(line)[:-1]]
    allowed = re.findall(r"^!(.*)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert set(copied) == set(allowed)
    assert all((ROOT / name).exists() for name in copied)
    assert steps("USER") == [f"{MEMBER['securityContext']['runAsUser']}:{MEMBER['securityContext']['runAsGroup']}"]
    assert steps("EXPOSE") == [f"{HTTP} {GRPC}"]
    (check,) = steps("HEALTHCHECK")
    assert f"http://127.0.0.1:{HTTP}/readyz" in check
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.MULTILINE)
    (install,) = re.findall(r"pip install (.*)$", DOCKERFILE, re.MULTILINE)
    assert flaw_of(install.replace("${EXTRAS}", extras)) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_steps_of_the_image_install_a_server_that_starts(tmp_path: Path) -> None:
    """What docker would run, without docker: the same files, the same commands, in a folder of their own."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in (word for line in steps("COPY") if "--from" not in line for word in shlex.split(line)[:-1]):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tmp_path)
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.MULTILINE)
    home, environment = tmp_path / "opt", {"PATH": "/usr/bin:/bin", "EXTRAS": extras}
    for step in (step for step in steps("RUN") if "/opt/holdfast" in step):
        command = step.replace("/opt/holdfast", str(home)).replace("python -m venv", f"{sys.executable} -m venv")
        subprocess.run(["sh", "-euc", command], cwd=tmp_path, env=environment, check=True)
    done = subprocess.run([home / "bin/holdfast", "doctor"], capture_output=True, text=True, cwd=home, check=False)
    assert re.search(r"ok +native engine", done.stdout), done.stdout
    assert re.search(r"ok +model", done.stdout), done.stdout


def test_the_settings_of_the_service_are_settings_of_ours(tmp_path: Path) -> None:
    server, *_ = (load(cls, flags={}, environment={}, file=DEPLOY / "holdfast.toml") for cls in GROUPS)
    unit = (DEPLOY / "holdfast.service").read_text()
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]) > server.drain_s + 20
    assert server.workers > 1  # otherwise SIGHUP, which reloads, would end it
    (command,) = re.findall(r"^ExecStart=\S*/holdfast serve (.*)$", unit, re.MULTILINE)
    assert serve.parsed(shlex.split(command), prog="holdfast serve").config
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / "holdfast.service"
    copy.write_text(unit.replace("/opt/holdfast/bin/holdfast", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_metric_and_label_of_the_dashboard_is_one_of_ours() -> None:
    board = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    known = {
        metric.name: {*collector._labelnames, "instance", "le"}
        for collector in vars(Metrics()).values()
        if hasattr(collector, "describe")
        for metric in collector.describe()
    }
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 20
    for expression in expressions:
        names = re.findall(r"\bholdfast_\w+", expression)
        assert names, expression
        labels = set(re.findall(r"\bby \(([\w, ]+)\)", expression)[0].split(", ")) if " by " in expression else set()
        for name in names:
            base = re.sub(r"_(total|bucket)$", "", name)
            assert base in known, name
            assert labels <= known[base], expression
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in board["panels"]]
    assert len(set(places)) == len(places)
