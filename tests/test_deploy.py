"""The deployment files, as far as that can be checked without a container engine: they parse, fit together, and say what the command takes."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from pipelines.cli import app

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = {path.name: list(yaml.safe_load_all(path.read_text())) for path in sorted((DEPLOY / "kuberay").glob("*.yaml"))}


def container_file() -> list[tuple[str, str]]:
    """Instructions with their arguments; continued lines are joined, comments dropped."""
    text = "\n".join(line for line in (DEPLOY / "Containerfile").read_text().splitlines() if not line.startswith("#"))
    lines = [line.split(maxsplit=1) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(word, rest) for word, rest in lines]


def check_command(words: list[str]) -> None:
    """The command line parses: known command, known options, values where they are wanted; nothing is run."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("tethys", list(words), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, list(words), parent=context)


def commands() -> list[list[str]]:
    import json

    found = [json.loads(rest) for word, rest in container_file() if word == "CMD" and rest.startswith("[")]
    found += [service["command"] for service in COMPOSE["services"].values() if "build" in service]
    for document in (d for documents in MANIFESTS.values() for d in documents):
        if document["kind"] == "RayJob":
            found.append(shlex.split(shlex.split(document["spec"]["entrypoint"])[2])[1:])
        if document["kind"] == "StatefulSet":
            found += [c["args"] for c in document["spec"]["template"]["spec"]["containers"]]
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_is_one_the_program_takes(words: list[str]) -> None:
    check_command(words)


def test_a_command_with_an_unknown_option_is_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        check_command(["serve", "--hots", "0.0.0.0"])


def test_the_container_copies_what_there_is_and_does_not_run_as_root() -> None:
    lines = container_file()
    assert {word for word, _ in lines} <= {
        "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD",
    }  # fmt: skip
    copied = [part for word, rest in lines if word == "COPY" and "--from" not in rest for part in rest.split()[:-1]]
    assert copied and all((ROOT / part).exists() for part in copied)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(packages) <= set(copied)
    assert [rest for word, rest in lines if word == "USER"][-1] == "tethys"


def images() -> list[str]:
    found = [rest.split()[0] for word, rest in container_file() if word == "FROM"]
    found += [service["image"] for service in COMPOSE["services"].values() if "image" in service]
    return found + re.findall(r"image: (\S+)", "".join(path.read_text() for path in (DEPLOY / "kuberay").glob("*.yaml")))


@pytest.mark.parametrize("image", images())
def test_images_are_pinned(image: str) -> None:
    tag = image.rpartition(":")[2]
    assert ":" in image and tag != "latest" and any(c.isdigit() for c in tag)


def test_the_compose_file_fits_together() -> None:
    services = COMPOSE["services"]
    assert {"tethys", "mlflow", "postgres", "broker"} <= set(services)
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            assert how["condition"] == "service_healthy"
            assert "healthcheck" in services[needed] or "build" in services[needed], (name, needed)
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in COMPOSE["volumes"]
        assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), "nothing is published beyond this machine"
    text = (DEPLOY / "compose.yaml").read_text()
    assert not re.search(r"(?i)password: *[^/\s{]", text), "no password stands in the file"
    hosts = {f"{match}" for match in re.findall(r"http://(\w+):5000", text)} - {"127", "localhost"}
    assert all(f"{host}:5000" in text.split("--allowed-hosts")[1].split()[0] for host in hosts)


def test_the_manifests_fit_together() -> None:
    (job,) = MANIFESTS["nightly.yaml"]
    pin = next(d for d in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"] if d.startswith("ray["))
    assert job["apiVersion"] == "ray.io/v1" and pin.split("==")[1].rstrip("*").rstrip(".") in job["spec"]["rayClusterSpec"]["rayVersion"]
    service, state = MANIFESTS["live.yaml"]
    assert service["spec"]["selector"] == state["spec"]["selector"]["matchLabels"] == state["spec"]["template"]["metadata"]["labels"]
    assert state["spec"]["replicas"] == 1, "a stream's memory lives in one process"
    pods = [state["spec"]["template"]["spec"]]
    pods += [job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]]
    pods += [group["template"]["spec"] for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]]
    for pod in pods:
        claims = state["spec"]["volumeClaimTemplates"] if pod is pods[0] else []
        volumes = {v["name"] for v in pod.get("volumes", [])} | {claim["metadata"]["name"] for claim in claims}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["resources"]["limits"]["memory"] and container["securityContext"]["allowPrivilegeEscalation"] is False
    (live,) = pods[0]["containers"]
    ports = {port["name"]: port["containerPort"] for port in live["ports"]}
    assert ports == {"http": int(live["args"][live["args"].index("--port") + 1])}
    for probe, path in (("startupProbe", "/readyz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/healthz")):
        assert live[probe]["httpGet"] == {"path": path, "port": "http"}
    routes = (ROOT / "pipelines/serving/app.py").read_text()
    assert all(f'"{path}"' in routes for path in ("/readyz", "/healthz", "/metrics"))
