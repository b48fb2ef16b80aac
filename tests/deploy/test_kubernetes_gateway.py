"""The component `gateway` of deploy/kubernetes, beside everything else that can be added to an overlay."""

from __future__ import annotations

import re

import kubernetes_validate
import pytest

from inferbus.workers.cli.gateway import gateway
from inferbus.workers.config import GatewaySettings, options
from tests.deploy.test_kubernetes import KUBERNETES, VERSIONS, of_kind, selected
from tests.support.kubectl import Manifest, combined

LABELS = {"app.kubernetes.io/name": "inferbus-gateway"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    components = [KUBERNETES / "components" / each for each in ("scaling", "deletion-cost", "gateway")]
    overlays = [KUBERNETES / "overlays" / "cpu"]
    images = [{"name": "inferbus-client", "newName": "registry.example/inferbus", "newTag": "client"}]
    return combined(tmp_path_factory.mktemp("own"), overlays, components, namespace="llm", images=images)


@pytest.fixture(scope="module")
def deployment(built: list[Manifest]) -> Manifest:
    [found] = [each for each in of_kind(built, "Deployment") if each["metadata"]["name"] == "gateway"]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_one_of_that_kubernetes_version(built: list[Manifest], version: str) -> None:
    ours = [each for each in built if each["metadata"].get("labels") == LABELS or "gateway" in str(each)]
    assert len(ours) >= 4
    for manifest in ours:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_its_command_and_settings_exist(built: list[Manifest], deployment: Manifest) -> None:
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    program, command, *arguments = container["args"]
    assert (program, command) == ("inferbus", "gateway")
    with gateway.make_context("gateway", arguments):
        pass
    known = {option.env for option in options()}
    assert {each["name"] for each in container["env"] if each["name"].startswith("INFERBUS_")} <= known
    [config] = of_kind(built, "ConfigMap")
    assert container["envFrom"][0]["configMapRef"]["name"] == config["metadata"]["name"]
    assert container["image"] == "registry.example/inferbus:client"


def test_it_is_asked_on_the_port_that_it_listens_on(built: list[Manifest], deployment: Manifest) -> None:
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    [listen] = [each["value"] for each in container["env"] if each["name"] == "INFERBUS_GATEWAY_LISTEN"]
    [port] = container["ports"]
    assert listen == f"0.0.0.0:{port['containerPort']}"
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port["name"]}
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": port["name"]}
    [service] = of_kind(built, "Service")
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert service["spec"]["selector"] == LABELS


def test_it_does_not_listen_without_keys(deployment: Manifest) -> None:
    spec = deployment["spec"]["template"]["spec"]
    [container] = spec["containers"]
    [file] = [each["value"] for each in container["env"] if each["name"] == "INFERBUS_GATEWAY_KEYS_FILE"]
    [mount] = [each for each in container["volumeMounts"] if file.startswith(each["mountPath"] + "/")]
    [volume] = [each for each in spec["volumes"] if each["name"] == mount["name"]]
    assert "optional" not in volume["secret"]
    assert not any(each["name"] == "INFERBUS_GATEWAY_OPEN" for each in container["env"])


def test_a_stopped_one_has_time_for_its_open_requests(deployment: Manifest) -> None:
    spec = deployment["spec"]["template"]["spec"]
    [container] = spec["containers"]
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > before + GatewaySettings().grace


def test_it_has_no_more_rights_than_it_needs_and_is_no_worker(
    built: list[Manifest], deployment: Manifest
) -> None:
    pod = deployment["spec"]["template"]
    spec = pod["spec"]
    assert pod["metadata"]["labels"] == LABELS
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {each["name"] for each in spec["containers"][0]["volumeMounts"]}
    assert mounted == {each["name"] for each in spec["volumes"]}
    policies = [each["spec"] for each in of_kind(built, "NetworkPolicy")]
    [policy] = [each for each in policies if selected(each["podSelector"], pod)]
    nats = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "nats"}}}
    assert policy["egress"][0] == {"to": [nats], "ports": [{"port": 4222}]}
    [budget] = [
        each for each in of_kind(built, "PodDisruptionBudget") if selected(each["spec"]["selector"], pod)
    ]
    assert budget["spec"]["maxUnavailable"] == 1
    assert deployment["spec"]["replicas"] > 1


def test_the_documentation_names_its_secret(deployment: Manifest) -> None:
    secrets = re.findall(r"'secretName': '([\w-]+)'", str(deployment))
    text = (KUBERNETES.parents[1] / "docs" / "kubernetes.md").read_text()
    assert all(f"`{each}`" in text or each in text for each in secrets)
