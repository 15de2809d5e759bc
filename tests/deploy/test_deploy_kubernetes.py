"""The kustomization: what it names exists, and what it starts is what the commands understand."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from deploy_support import DEPLOY, PUBLIC, STOP_MARGIN_S, documents, parse, served

from kvpack import __version__

HERE = DEPLOY / "kubernetes"
BASE = [one for path in sorted((HERE / "base").glob("*.yaml")) for one in documents(path)]
SITE = documents(HERE / "site" / "kustomization.yaml")[0]
SCRIPT = "/opt/kvpack/share/credentials_sync.py"


def of_kind(kind: str) -> dict[str, dict]:
    return {one["metadata"]["name"]: one for one in BASE if one.get("kind") == kind}


STATEFUL = of_kind("StatefulSet")["kvpack"]["spec"]
POD = STATEFUL["template"]["spec"]
LABELS = STATEFUL["template"]["metadata"]["labels"]
NODE = POD["containers"][0]
EVERY = [*POD["initContainers"], *POD["containers"]]
VOLUMES = {one["name"]: one for one in POD["volumes"]}
SETTINGS = dict(one.split("=", 1) for one in SITE["configMapGenerator"][0]["literals"])


def filled(words: list[str], pod: str = "kvpack-0") -> list[str]:
    given = {"POD_NAME": pod, **SETTINGS}
    return [re.sub(r"\$\((\w+)\)", lambda match: given[match[1]], word) for word in words]


def secrets_of(volume: dict) -> list[str]:
    if "secret" in volume:
        return [volume["secret"]["secretName"]]
    sources = volume.get("projected", {}).get("sources", [])
    return [one["secret"]["name"] for one in sources]


def test_every_file_of_the_folder_is_a_resource_of_the_kustomization():
    listed = documents(HERE / "base" / "kustomization.yaml")[0]["resources"]
    found = {path.name for path in (HERE / "base").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(listed) == found
    assert SITE["resources"] == ["../base"]


def test_the_node_is_started_with_options_that_go_together():
    config = served(filled(NODE["args"]))
    ports = {one["name"]: one["containerPort"] for one in NODE["ports"]}
    assert ports == {"https": config.http.address.port, "grpc": config.address.port}
    assert config.directory_url.startswith("etcd://")
    assert str(config.advertise) == "kvpack-0.kvpack-nodes:7411"
    assert STATEFUL["serviceName"] == "kvpack-nodes"
    mounts = [Path(one["mountPath"]) for one in NODE["volumeMounts"]]
    used = (config.data_dir, config.credentials_dir, config.model_dir, config.http.api_key_file)
    for path in (*used, config.http.tls_certificate, config.http.tls_key):
        assert any(path.is_relative_to(mount) for mount in mounts), path
    assert NODE["envFrom"][0]["configMapRef"]["name"] == SITE["configMapGenerator"][0]["name"]


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_a_probe_asks_a_public_route_on_a_port_that_is_there(probe):
    asked = NODE[probe]["httpGet"]
    assert asked["path"] in PUBLIC
    assert asked["port"] in {one["name"] for one in NODE["ports"]}
    assert asked["scheme"] == "HTTPS"


def test_a_stop_has_the_time_that_its_parts_may_take():
    shell, option, text = NODE["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, option) == ("sh", "-c")
    sleep, bound = re.match(r"sleep (\d+); timeout (\d+) (?=kvnode drain )", text).groups()
    words = shlex.split(text[text.index("kvnode") : text.index("||")].replace("$POD_NAME", "a"))
    name, given = parse(words)
    assert name.endswith("drain")
    assert given["timeout_s"] < float(bound)
    assert given["node"] == "a@127.0.0.1:7411"
    config = served(filled(NODE["args"]))
    parts = float(sleep) + float(bound) + config.http.drain_s + STOP_MARGIN_S
    assert POD["terminationGracePeriodSeconds"] >= parts
    made = next(one["args"] for one in POD["initContainers"] if one["name"] == "client")
    assert f"--credentials={given['credentials']}" in made


def test_volumes_and_secrets_that_are_named_exist():
    claimed = {one["metadata"]["name"] for one in STATEFUL["volumeClaimTemplates"]}
    mounted = {one["name"] for container in EVERY for one in container["volumeMounts"]}
    assert mounted == claimed | set(VOLUMES)
    certificates = {one["spec"]["secretName"] for one in of_kind("Certificate").values()}
    given = {one["name"] for one in SITE["secretGenerator"]}
    assert SITE["generatorOptions"]["disableNameSuffixHash"]
    named = {secret for volume in VOLUMES.values() for secret in secrets_of(volume)}
    named |= {one["secretRef"]["name"] for one in NODE["envFrom"] if "secretRef" in one}
    assert named <= certificates | given
    assert given <= named
    assert POD["serviceAccountName"] in of_kind("ServiceAccount")


def test_every_pod_has_a_leaf_that_the_others_pin_and_sees_no_other_pods_key():
    pods = [f"kvpack-{number}" for number in range(STATEFUL["replicas"])]
    certificates = of_kind("Certificate")
    for name in (*pods, "kvpack-client"):
        spec = certificates[name]["spec"]
        assert (spec["commonName"], spec["dnsNames"]) == (name, [name])
        assert set(spec["usages"]) >= {"server auth", "client auth"}
    for one in certificates.values():
        assert one["spec"]["privateKey"]["algorithm"] == "ECDSA"
        assert one["spec"]["issuerRef"]["name"] in of_kind("Issuer")
    own = VOLUMES["own"]["projected"]["sources"]
    for pod, source in zip(pods, own, strict=True):
        assert source["secret"]["name"] == certificates[pod]["spec"]["secretName"]
        assert {one["path"].split("/")[0] for one in source["secret"]["items"]} == {pod}
    for container in EVERY:
        for one in container["volumeMounts"]:
            if one["name"] == "own":
                assert one["subPathExpr"] == "$(POD_NAME)"
    peers = [item for one in VOLUMES["peers"]["projected"]["sources"] for item in
             one["secret"]["items"]]  # fmt: skip
    assert {one["key"] for one in peers} == {"tls.crt"}
    assert {one["path"] for one in peers} == {
        *(f"nodes/{pod}.crt" for pod in pods),
        "clients/kvpack-client.crt",
    }


def test_what_the_script_is_given_are_arguments_of_it_and_places_that_are_mounted():
    dockerfile = (DEPLOY / "container" / "Dockerfile").read_text()
    assert re.search(r"^COPY deploy/container/credentials_sync\.py .*/opt/kvpack/share/$",
                     dockerfile, re.MULTILINE)  # fmt: skip
    known = set(re.findall(r'"(--[a-z-]+)"', (DEPLOY / "container" / "credentials_sync.py")
                           .read_text()))  # fmt: skip
    for container in POD["initContainers"]:
        assert container["command"] == ["python", SCRIPT]
        mounts = [Path(one["mountPath"]) for one in container["volumeMounts"]]
        for argument in container["args"][1:]:
            option, _, value = argument.partition("=")
            assert option in known
            for path in value.split(":"):
                assert any(Path(path).is_relative_to(mount) for mount in mounts), argument


def test_services_budget_and_policies_are_about_these_pods_and_ports():
    selectors = [one["spec"]["selector"] for one in of_kind("Service").values()]
    selectors.append(STATEFUL["selector"]["matchLabels"])
    selectors.append(of_kind("PodDisruptionBudget")["kvpack"]["spec"]["selector"]["matchLabels"])
    selectors.append(POD["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"])
    policies = of_kind("NetworkPolicy")
    selectors.append(policies["kvpack-nodes"]["spec"]["podSelector"]["matchLabels"])
    assert all(selector.items() <= LABELS.items() for selector in selectors)
    ports = {one["name"] for one in NODE["ports"]}
    for service in of_kind("Service").values():
        assert {one["targetPort"] for one in service["spec"]["ports"]} <= ports
    assert of_kind("Service")["kvpack-nodes"]["spec"]["clusterIP"] == "None"
    inward = policies["kvpack-nodes"]["spec"]["ingress"]
    opened = {port["port"] for rule in inward for port in rule["ports"]}
    assert opened == {one["containerPort"] for one in NODE["ports"]}
    assert all(rule.get("from") for rule in inward), "open to everybody"


def test_what_no_policy_allows_is_denied():
    denied = of_kind("NetworkPolicy")["deny-by-default"]["spec"]
    assert denied == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_every_container_meets_the_restricted_standard_that_the_namespace_enforces():
    labels = of_kind("Namespace")["kvpack"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert POD["securityContext"]["runAsNonRoot"]
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert not POD["automountServiceAccountToken"]
    for container in EVERY:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        assert container["image"] == SITE["images"][0]["name"]
    assert str(SITE["images"][0]["newTag"]) == __version__


def test_kustomize_renders_one_whole(tmp_path):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not here, so nothing renders the kustomization")
    copy = tmp_path / "kubernetes"
    shutil.copytree(HERE, copy)
    for name in ("tenant.key", "api-keys", "s3.env"):
        (copy / "site" / name).write_text("NAME=made-up\n")
    ran = subprocess.run(
        ["kubectl", "kustomize", str(copy / "site")], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    made = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(ran.stdout)}
    for one in BASE:
        if one["kind"] != "Kustomization":
            assert (one["kind"], one["metadata"]["name"]) in made
    stateful = made["StatefulSet", "kvpack"]
    assert stateful["metadata"]["namespace"] == "kvpack"
    containers = stateful["spec"]["template"]["spec"]["containers"]
    assert containers[0]["image"] == f"kvpack:{__version__}"
    size = documents(HERE / "site" / "size.yaml")[0]["spec"]["template"]["spec"]["containers"][0]
    assert containers[0]["resources"] == size["resources"]
    assert {name for kind, name in made if kind == "Secret"} == {
        "kvpack-tenant-key",
        "kvpack-api-keys",
        "kvpack-s3",
    }
