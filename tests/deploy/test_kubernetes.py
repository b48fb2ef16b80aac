"""deploy/kubernetes, built by kubectl and validated for several versions of Kubernetes, without a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from inferbus.schemas.subjects import CLASSES
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.cli.serve import worker
from inferbus.workers.cli.streams import init
from inferbus.workers.config import WorkerSettings, options
from tests.support.kubectl import Manifest, combined, kustomize

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = {
    "cpu": "scaling",
    "gpu": "scaling",
    "mps": "scaling-mps",
    "lws": "scaling-lws",
    "rbg": "scaling-rbg",
}
"""Each with the component that scales it."""
VERSIONS = ("1.30", "1.33", "1.37")
CUSTOM = re.compile(r"(keda\.sh|disaggregatedset\.x-k8s\.io|workloads\.x-k8s\.io)/")
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
NATS_CONFIG = (ROOT / "deploy" / "nats" / "nats.conf").read_text()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Manifest]]:
    """Each overlay alone, and with all that can be added to it in a namespace of its own."""
    found = {name: kustomize(KUBERNETES / "overlays" / name) for name in OVERLAYS}
    for name, scaling in OVERLAYS.items():
        components = [KUBERNETES / "components" / each for each in (scaling, "deletion-cost")]
        folder = tmp_path_factory.mktemp(name)
        own = ["INFERBUS_SERVED_MODEL=my-model", "NATS_MONITOR=nats-headless.llm:8222"]
        overlays = [KUBERNETES / "overlays" / name]
        found[f"{name} in full"] = combined(
            folder,
            overlays,
            components,
            namespace="llm",
            configMapGenerator=[{"name": "inferbus", "behavior": "merge", "literals": own}],
        )
    return found


EVERY = [*OVERLAYS, *(f"{name} in full" for name in OVERLAYS)]
every = pytest.mark.parametrize("name", EVERY)
scaled = pytest.mark.parametrize("name", [each for each in EVERY if each.endswith("in full")])


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] == kind]


def pod_templates(manifests: list[Manifest]) -> Iterator[Manifest]:
    """The pods of workers, whatever makes them."""
    for each in manifests:
        spec = each.get("spec", {})
        if each["kind"] == "Deployment":
            yield spec["template"]
        for role in spec.get("roles", ()):
            pattern = role.get("standalonePattern") or {"template": None}
            yield pattern["template"] or role["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def jobs(manifests: list[Manifest]) -> Iterator[Manifest]:
    yield from (each["spec"]["template"] for each in of_kind(manifests, "Job"))


def settings(manifests: list[Manifest]) -> dict[str, str]:
    [found] = of_kind(manifests, "ConfigMap")
    data: dict[str, str] = found["data"]
    return data


def selected(selector: dict[str, Any], pod: Manifest) -> bool:
    return bool(selector["matchLabels"].items() <= pod["metadata"]["labels"].items())


@scaled
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_one_of_that_kubernetes_version(
    built: dict[str, list[Manifest]], name: str, version: str
) -> None:
    validated = 0
    for manifest in built[name]:
        if not CUSTOM.match(manifest["apiVersion"]):
            kubernetes_validate.validate(manifest, version, strict=True)
            validated += 1
    for pod in pod_templates(built[name]):
        # Those inside of custom objects, too.
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": pod}
        kubernetes_validate.validate(template, version, strict=True)
    assert validated > 5


@scaled
def test_keda_knows_every_field_of_the_scaled_objects(built: dict[str, list[Manifest]], name: str) -> None:
    from cloudcoil.models.keda.v1alpha1 import ScaledObject

    for manifest in of_kind(built[name], "ScaledObject"):
        # A field that it does not know, the model leaves out.
        read = ScaledObject.model_validate(manifest)
        assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == manifest


@every
def test_there_is_a_worker_of_each_role_and_its_command_exists(
    built: dict[str, list[Manifest]], name: str
) -> None:
    roles = []
    for pod in pod_templates(built[name]):
        for container in pod["spec"]["containers"]:
            program, command, *arguments = container["args"]
            assert (program, command) == ("inferbus", "worker")
            with worker.make_context("worker", arguments) as context:
                roles.append(context.params["role"])
                assert container["name"] == context.params["role"]
    assert sorted(roles) == ["decode", "prefill"]


@every
def test_a_job_makes_the_streams_and_consumers_of_the_model(
    built: dict[str, list[Manifest]], name: str
) -> None:
    [pod] = jobs(built[name])
    [container] = pod["spec"]["containers"]
    program, command, *arguments = container["args"]
    assert (program, command) == ("inferbus", "init")
    with init.make_context("init", arguments) as context:
        assert context.params["model"] == "$(INFERBUS_SERVED_MODEL)"


@every
def test_settings_exist_and_every_pod_has_them(built: dict[str, list[Manifest]], name: str) -> None:
    known = {option.env for option in options()}
    [config] = of_kind(built[name], "ConfigMap")
    for pod in (*pod_templates(built[name]), *jobs(built[name])):
        for container in pod["spec"]["containers"]:
            assert container["envFrom"][0]["configMapRef"]["name"] == config["metadata"]["name"]
            used = {each["name"] for each in container.get("env", ())} | set(config["data"])
            assert {each for each in used if each.startswith("INFERBUS_")} <= known
            for variable in re.findall(r"\$\((\w+)\)", " ".join(container["args"])):
                assert variable in config["data"]


@every
def test_a_pod_announces_its_own_address(built: dict[str, list[Manifest]], name: str) -> None:
    for pod in pod_templates(built[name]):
        for container in pod["spec"]["containers"]:
            [host] = [each for each in container["env"] if each["name"] == "INFERBUS_BOOTSTRAP_HOST"]
            assert host["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


@every
def test_a_worker_has_two_hours_to_load_and_is_asked_whether_it_is_ready(
    built: dict[str, list[Manifest]], name: str
) -> None:
    for pod in pod_templates(built[name]):
        ports = [port for each in pod["spec"]["containers"] for port in each["ports"]]
        # Of one pod: neither a name nor a number twice.
        assert (
            len({each["name"] for each in ports})
            == len({each["containerPort"] for each in ports})
            == len(ports)
        )
        for container in pod["spec"]["containers"]:
            [port] = container["ports"]
            [metrics] = [
                each["value"] for each in container["env"] if each["name"] == "INFERBUS_METRICS_PORT"
            ]
            assert int(metrics) == port["containerPort"]
            startup, ready, live = (
                container[f"{each}Probe"] for each in ("startup", "readiness", "liveness")
            )
            assert startup["periodSeconds"] * startup["failureThreshold"] == 7200
            assert startup["httpGet"] == ready["httpGet"] == {"path": "/readyz", "port": port["name"]}
            assert live["httpGet"] == {"path": "/livez", "port": port["name"]}
    for deployment in of_kind(built[name], "Deployment"):
        assert deployment["spec"]["progressDeadlineSeconds"] > 7200


@every
def test_a_stopped_worker_has_time_to_drain(built: dict[str, list[Manifest]], name: str) -> None:
    grace = float(settings(built[name])["INFERBUS_GRACE"])
    assert grace == WorkerSettings().grace
    for pod in pod_templates(built[name]):
        assert pod["spec"]["terminationGracePeriodSeconds"] == grace + 60


@every
def test_nothing_runs_with_more_rights_than_it_needs(built: dict[str, list[Manifest]], name: str) -> None:
    for pod in (*pod_templates(built[name]), *jobs(built[name])):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@every
def test_what_is_mounted_is_a_volume_of_the_pod_and_used(built: dict[str, list[Manifest]], name: str) -> None:
    for pod in (*pod_templates(built[name]), *jobs(built[name])):
        spec = pod["spec"]
        containers = (*spec["containers"], *spec.get("initContainers", ()))
        mounted = {mount["name"] for each in containers for mount in each["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


@every
def test_budgets_and_network_policies_select_the_pods(built: dict[str, list[Manifest]], name: str) -> None:
    pods = list(pod_templates(built[name]))
    budgets = of_kind(built[name], "PodDisruptionBudget")
    assert [sum(selected(each["spec"]["selector"], pod) for each in budgets) for pod in pods] == [1] * len(
        pods
    )
    assert len(budgets) == len(pods)
    policies = of_kind(built[name], "NetworkPolicy")
    for pod in (*pods, *jobs(built[name])):
        assert all(selected(policy["spec"]["podSelector"], pod) for policy in policies)


@every
def test_workers_may_talk_to_each_other_and_to_nats_and_take_nothing_from_others(
    built: dict[str, list[Manifest]], name: str
) -> None:
    [policy] = [
        each["spec"]
        for each in of_kind(built[name], "NetworkPolicy")
        if each["metadata"]["name"] == "inferbus"
    ]
    ours = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "inferbus"}}}
    nats = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "nats"}}}
    assert policy["ingress"] == [{"from": [ours]}]
    assert policy["egress"][:2] == [{"to": [ours]}, {"to": [nats], "ports": [{"port": 4222}]}]


@every
def test_images_are_targets_of_the_dockerfile(built: dict[str, list[Manifest]], name: str) -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE))
    for pod in (*pod_templates(built[name]), *jobs(built[name])):
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
            repository, _, tag = container["image"].partition(":")
            assert (repository, tag in targets) in (("inferbus", True), ("inferbus-client", False))


def test_images_of_a_kustomization_of_ones_own_reach_workers_and_clients(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    own = next(
        each
        for each in map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
        if "images" in each
    )
    where = [KUBERNETES / "components" / each for each in ("scaling", "gateway")]
    found = combined(tmp_path, [KUBERNETES / "overlays" / "gpu"], where, images=own["images"])
    images = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["containers"][0]["image"]
        for each in found
        if each["kind"] in ("Deployment", "Job")
    }
    worker, client = "registry.example/inferbus:gpu", "registry.example/inferbus:client"
    assert images == {"decode": worker, "prefill": worker, "init": client, "gateway": client}


@scaled
def test_workers_are_scaled_by_the_lag_of_both_consumers_of_their_model(
    built: dict[str, list[Manifest]], name: str
) -> None:
    model = settings(built[name])["INFERBUS_SERVED_MODEL"]
    objects = of_kind(built[name], "ScaledObject")
    assert objects
    for manifest in objects:
        triggers = {each["name"]: each for each in manifest["spec"]["triggers"]}
        for job_class in CLASSES:
            metadata = triggers[job_class]["metadata"]
            assert metadata["stream"] == layout.JOBS
            assert metadata["natsServerMonitoringEndpoint"] == settings(built[name])["NATS_MONITOR"]
            assert metadata["consumer"] == layout.durable(model, job_class)
        # The formula names every trigger, and no other.
        formula = manifest["spec"]["advanced"]["scalingModifiers"]["formula"]
        assert set(re.findall(r"[a-z]+", formula)) - {"max"} == set(triggers)


@scaled
def test_what_is_scaled_exists_and_has_no_number_of_its_own(
    built: dict[str, list[Manifest]], name: str
) -> None:
    deployments = {each["metadata"]["name"]: each for each in of_kind(built[name], "Deployment")}
    made = {
        f"{each['metadata']['name']}-{role['name']}"
        for each in built[name]
        for role in each.get("spec", {}).get("roles", ())
    }
    targets = [each["spec"]["scaleTargetRef"]["name"] for each in of_kind(built[name], "ScaledObject")]
    assert sorted(targets) == sorted(deployments or made)
    assert not any("replicas" in each["spec"] for each in deployments.values())


@scaled
def test_no_worker_is_taken_away_while_it_loads_its_model(
    built: dict[str, list[Manifest]], name: str
) -> None:
    for manifest in of_kind(built[name], "ScaledObject"):
        assert manifest["spec"]["initialCooldownPeriod"] >= 1800
        # Prefill is not idle before decode is gone.
        kept = "decodes" in manifest["spec"]["advanced"]["scalingModifiers"]["formula"]
        assert kept or manifest["spec"]["cooldownPeriod"] >= 1800
        # An error of a trigger, such as a consumer that is not there, changes nothing then.
        assert "fallback" not in manifest["spec"]


@pytest.mark.parametrize("name", ["cpu in full", "gpu in full", "mps in full"])
def test_a_worker_may_change_its_own_pods_deletion_cost_and_nothing_else(
    built: dict[str, list[Manifest]], name: str
) -> None:
    [role] = of_kind(built[name], "Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
    [policy] = of_kind(built[name], "ValidatingAdmissionPolicy")
    [binding] = of_kind(built[name], "ValidatingAdmissionPolicyBinding")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    [account] = of_kind(built[name], "ServiceAccount")
    assert f':{account["metadata"]["name"]}"' in policy["spec"]["matchConditions"][0]["expression"]
    for pod in pod_templates(built[name]):
        first = pod["spec"]["containers"][0]
        assert {"name": "INFERBUS_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}} in first[
            "env"
        ]


def values(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((KUBERNETES / "nats" / f"{name}.yaml").read_text())
    return content


@pytest.mark.parametrize("setting", ["max_payload", "max_pending", "write_deadline", "sync_interval"])
def test_nats_has_the_settings_of_nats_conf(setting: str) -> None:
    config = values("single")["config"]
    both = {**config["merge"], **config["jetstream"]["merge"]}
    [expected] = re.findall(rf'^\s*{setting}: "?(\w+)"?$', NATS_CONFIG, re.MULTILINE)
    assert str(both[setting]).strip("<> ") == expected


def test_a_cluster_of_nats_servers_has_room_for_streams_in_memory() -> None:
    config = values("cluster")["config"]
    assert config["cluster"] == {"enabled": True, "replicas": 3}
    assert config["jetstream"]["memoryStore"]["enabled"] is True
    replicas = settings(kustomize(KUBERNETES / "overlays" / "gpu"))["INFERBUS_STREAMS_REPLICAS"]
    assert int(replicas) == config["cluster"]["replicas"]
