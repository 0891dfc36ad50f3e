"""docs/operators/kubernetes/ and the Containerfiles: what they ask of Kubernetes, Prometheus, Grafana and the program
is what these have. One real server and one router are started by the manifests' own command lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import secrets
import shlex
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import kubernetes_validate
import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engine.cli.main import canonical
from engine.embedding import EngineConfig
from engine.types.errors import EngineError
from engine_connectors.tcp.card import TCPOptions
from engine_kit.flags import merged_settings, name_positional_model
from engine_nodes.card import AgentOptions
from engine_router.config import read_config
from engine_server.commands import give_role
from engine_server.config import ServerConfig
from tests.docs import commands
from tests.docs.markdown import ROOT
from tests.serving.conftest import Server

pytestmark = pytest.mark.xdist_group("kubernetes")

FOLDER = ROOT / "docs" / "operators" / "kubernetes"
MANIFESTS = ("server.yaml", "gpu.yaml", "replicas.yaml", "disaggregation.yaml", "group.yaml")
VERSIONS = ("1.30", kubernetes_validate.latest_version())
"""The oldest that has all that is used switched on (`preStop.sleep`), and the newest whose schemas are at hand."""
WORKLOADS = ("Deployment", "StatefulSet")
DRAIN_MARGIN = 15
"""Seconds that a pod has beside `preStop` and `--shutdown-timeout`, to tell clients and to end its processes."""
TARGET_LABELS = {"job", "instance", "namespace", "pod"}
"""Of every sample, by Prometheus and by prometheus.yaml."""

Documents = list[dict[str, Any]]
Exposed = Mapping[str, set[str]]


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def documents(text: str) -> Documents:
    """Also what a LeaderWorkerSet makes: its leaders, as a Deployment's pods, and a worker's pod."""
    found = list(yaml.safe_load_all(text))
    for group in named(found, "LeaderWorkerSet"):
        template, name = group["spec"].get("leaderWorkerTemplate", {}), group["metadata"]["name"]
        if {"leaderTemplate", "workerTemplate"} <= set(template):
            labels = {"matchLabels": template["leaderTemplate"]["metadata"]["labels"]}
            leaders = {"selector": labels, "template": template["leaderTemplate"]}
            found.append({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": leaders})
            worker = {"name": f"{name}-0-1", **template["workerTemplate"]["metadata"]}
            spec = template["workerTemplate"]["spec"]
            found.append({"apiVersion": "v1", "kind": "Pod", "metadata": worker, "spec": spec})
    return found


def named(found: Documents, *kinds: str) -> Documents:
    return [one for one in found if one["kind"] in kinds]


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    return workload["spec"]["template"]["spec"]


def containers(found: Documents) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each with its workload."""
    for workload in named(found, *WORKLOADS):
        for container in pod(workload)["containers"]:
            yield workload, container


def command_line(container: dict[str, Any]) -> str:
    """As the image's entry point makes it. What the downward API fills in is a word."""
    return shlex.join(["engine", *(re.sub(r"\$\(\w+\)", "word", one) for one in container["args"])])


def flag(container: dict[str, Any], name: str, default: str = "") -> list[str]:
    """What a flag that may be repeated, or have commas, names."""
    given = [one.partition("=")[2] for one in container["args"] if one.startswith(f"--{name}=")]
    return [one for text in given or [default] for one in text.split(",") if one]


# -- the manifests -----------------------------------------------------------------------------------------------------
def misfits(found: Documents, versions: Sequence[str] = VERSIONS) -> list[str]:
    """What the schemas of Kubernetes say, unknown fields included."""
    faults = []
    for document in found:
        for version in versions:
            if document["kind"] == "LeaderWorkerSet":
                faults += group_misfits(document)
                continue
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
                faults.append(f"{document['kind']} by {version}: {error.message}")
    return faults


GROUP_FIELDS = {
    "spec": {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig"},
    "leaderWorkerTemplate": {
        *("leaderTemplate", "workerTemplate", "size", "restartPolicy", "subGroupPolicy", "volumeClaimTemplates"),
        "persistentVolumeClaimRetentionPolicy",
    },
}
"""Of leaderworkerset.x-k8s.io/v1, which is not among Kubernetes' own schemas."""
GROUP_RESTARTS = {"RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"}


def group_misfits(group: dict[str, Any]) -> list[str]:
    """What a LeaderWorkerSet would not take; its pods' templates aside, which `documents` shows as Kubernetes' own."""
    template = group["spec"].get("leaderWorkerTemplate", {})
    faults = [f"no field {name}" for name in set(group["spec"]) - GROUP_FIELDS["spec"]]
    faults += [f"no field {name}" for name in set(template) - GROUP_FIELDS["leaderWorkerTemplate"]]
    if group["apiVersion"] != "leaderworkerset.x-k8s.io/v1" or "workerTemplate" not in template:
        faults.append("no LeaderWorkerSet")
    if template.get("restartPolicy", "None") not in GROUP_RESTARTS or not isinstance(template.get("size", 1), int):
        faults.append(f"{template.get('restartPolicy')}, {template.get('size')}")
    return faults


def group_loose_ends(found: Documents) -> list[str]:
    """Whether leader and workers of a LeaderWorkerSet find each other, with one token, and leave in order."""
    faults = []
    services = {one["metadata"]["name"] for one in named(found, "Service")}
    for group, worker_pod in zip(named(found, "LeaderWorkerSet"), named(found, "Pod"), strict=True):
        template = group["spec"]["leaderWorkerTemplate"]
        leader_spec, worker_spec = template["leaderTemplate"]["spec"], worker_pod["spec"]
        (leader,), (worker,) = leader_spec["containers"], worker_spec["containers"]
        if group["metadata"]["name"] in services:
            faults.append("the set makes a Service of its own name")
        if flag(leader, "nodes.count") != [str(template["size"] - 1)]:
            faults.append("--nodes.count is not the number of workers")
        ports = {port["name"]: port["containerPort"] for port in leader["ports"]}
        if flag(leader, "nodes.listen") != [f"tcp://$(POD_IP):{ports.get('nodes')}"] or {
            one["name"]: one.get("valueFrom") for one in leader["env"]
        }.get("POD_IP") != {"fieldRef": {"fieldPath": "status.podIP"}}:
            faults.append("the leader does not listen at its own address")
        if worker["args"][:2] != ["join", f"tcp://$(LWS_LEADER_ADDRESS):{ports.get('nodes')}"]:
            faults.append("the worker does not look for the leader")
        tokens = [*flag(leader, "nodes.token_file"), *flag(worker, "token-file")]
        for spec, container in ((leader_spec, leader), (worker_spec, worker)):
            volumes, (copies,) = {volume["name"]: volume for volume in spec["volumes"]}, spec["initContainers"]
            places = {
                mount["mountPath"]: mount["name"] for mount in [*container["volumeMounts"], *copies["volumeMounts"]]
            }
            *_, source, target = copies["command"]
            kinds = [volumes.get(places.get(str(Path(file).parent), ""), {}) for file in (source, target)]
            if (
                {*tokens, target} != {target}
                or len(tokens) != 2
                or "secret" not in kinds[0]
                or "emptyDir" not in kinds[1]
            ):
                faults.append(f"the token is not copied to {tokens}")
            if set(places.values()) != set(volumes):
                faults.append(f"volumes and their mounts differ: {sorted(volumes)}")
        models = [[m for m in container["volumeMounts"] if m["name"] == "models"] for container in (leader, worker)]
        if models[0] != models[1]:
            faults.append("the model is not at the same path")
        drain = leader["lifecycle"]["preStop"]["sleep"]["seconds"] + int(flag(leader, "shutdown-timeout")[0])
        stays = worker["lifecycle"]["preStop"]["sleep"]["seconds"]
        if not drain < stays <= worker_spec["terminationGracePeriodSeconds"] - DRAIN_MARGIN:
            faults.append("the workers leave before the leader has drained")
    return faults


def loose_ends(found: Documents) -> list[str]:
    """What schemas cannot see: names that lead nowhere, times that do not fit. Volumes may be of server.yaml."""
    faults = group_loose_ends(found)
    pods = {one["metadata"]["name"]: one for one in named(found, *WORKLOADS)}
    labels = {name: one["spec"]["template"]["metadata"]["labels"].items() for name, one in pods.items()}
    services = {one["metadata"]["name"]: one for one in named(found, "Service")}
    budgets = [(one, one["spec"]["selector"]["matchLabels"]) for one in named(found, "PodDisruptionBudget")]
    chosen = [(one, one["spec"]["selector"]["matchLabels"]) for one in pods.values()]
    for one, selector in [*chosen, *budgets, *((one, one["spec"]["selector"]) for one in services.values())]:
        if sum(selector.items() <= own for own in labels.values()) != 1:
            faults.append(f"{one['kind']} {one['metadata']['name']} does not choose one workload's pods")
    for one in services.values():
        behind = [c for w, c in containers(found) if one["spec"]["selector"].items() <= labels[w["metadata"]["name"]]]
        ports = {port["name"] for container in behind for port in container["ports"]}
        faults += [f"no port {p['targetPort']}" for p in one["spec"]["ports"] if p["targetPort"] not in ports]
    for one in named(found, "HorizontalPodAutoscaler"):
        target = one["spec"]["scaleTargetRef"]
        if pods.get(target["name"], {}).get("kind") != target["kind"] or "replicas" in pods[target["name"]]["spec"]:
            faults.append(f"{target} is not there, or says itself how many pods it has")
    claims = {one["metadata"]["name"] for one in named(documents(read("server.yaml")), "PersistentVolumeClaim")}
    for workload, container in containers(found):
        spec = pod(workload)
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        if [ports.get("http")] != flag(container, "port"):
            faults.append(f"the port http is not --port: {ports}")
        if "kv" in ports and [ports["kv"]] != flag(container, "kv-connector.port"):
            faults.append(f"the port kv is not --kv-connector.port: {ports}")
        probes = [probe for name, probe in container.items() if name.endswith("Probe")]
        faults += [f"a probe asks {p['httpGet']['port']}" for p in probes if p["httpGet"]["port"] not in ports]
        volumes = {volume["name"] for volume in spec["volumes"]}
        mounted = [mount for one in [container, *spec.get("initContainers", [])] for mount in one["volumeMounts"]]
        if {mount["name"] for mount in mounted} != volumes:
            faults.append(f"volumes and their mounts differ: {sorted(volumes)}")
        asked = {v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
        faults += [f"nobody claims {name}" for name in asked - claims]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        files = [word for word in re.findall(r"(/[\w./-]+)", " ".join(container["args"])) if "//" not in word]
        faults += [
            f"{file} lies in no volume"
            for file in files
            if file.count("/") > 1 and not file.startswith(tuple(f"{mount}/" for mount in mounts))
        ]
        drain = container["lifecycle"]["preStop"]["sleep"]["seconds"] + int(flag(container, "shutdown-timeout")[0])
        if spec["terminationGracePeriodSeconds"] < drain + DRAIN_MARGIN:
            faults.append(f"{workload['metadata']['name']} is killed while it drains")
        if workload["kind"] == "StatefulSet" and (
            services.get(workload["spec"]["serviceName"], {"spec": {}})["spec"].get("clusterIP") != "None"
        ):
            faults.append(f"no headless service {workload['spec']['serviceName']}")
        peers = [f"http://{peer}:8000" for peer in flag(container, "kv-connector.peers")]
        for address in [*(a for name in ("backend", "prefill", "decode") for a in flag(container, name)), *peers]:
            match = re.fullmatch(r"http://([\w-]+)-(\d+)\.([\w-]+):8000", address)
            if match is None or match[1] not in pods or pods[match[1]]["spec"].get("serviceName") != match[3]:
                faults.append(f"{address} is no pod's")
            elif int(match[2]) >= most_pods(found, pods[match[1]]):
                faults.append(f"{address} is never started")
    known = {a for _, c in containers(found) for name in ("backend", "prefill", "decode") for a in flag(c, name)}
    for workload in named(found, "StatefulSet"):
        name = workload["metadata"]["name"]
        for place in range(most_pods(found, workload)):
            if f"http://{name}-{place}.{workload['spec']['serviceName']}:8000" not in known:
                faults.append(f"no router knows {name}-{place}")
    return faults


def most_pods(found: Documents, workload: dict[str, Any]) -> int:
    """Of a workload, by itself or by its autoscaler."""
    scaled = [
        one["spec"]["maxReplicas"]
        for one in named(found, "HorizontalPodAutoscaler")
        if one["spec"]["scaleTargetRef"]["name"] == workload["metadata"]["name"]
    ]
    return scaled[0] if scaled else int(workload["spec"].get("replicas", 1))


def test_every_file_is_checked():
    assert {path.name for path in FOLDER.iterdir()} == {
        *MANIFESTS,
        "alerts.yaml",
        "dashboard.json",
        "prometheus-adapter.yaml",
        "prometheus.yaml",
    }
    kinds = {one["kind"] for name in MANIFESTS for one in documents(read(name))}
    assert kinds >= {*WORKLOADS, "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget", "PersistentVolumeClaim"}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_what_kubernetes_takes(name):
    assert misfits(documents(read(name))) == []


@pytest.mark.parametrize("name", MANIFESTS)
def test_what_manifests_name_is_there(name):
    assert loose_ends(documents(read(name))) == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("server.yaml", "periodSeconds: 5", "periodSecond: 5"),
        ("server.yaml", "replicas: 1", "replicas: one"),
        ("server.yaml", "sleep: {seconds: 10}", "sleep: 10"),
        ("server.yaml", "      containers:", "      container:"),
        ("replicas.yaml", "autoscaling/v2", "autoscaling/v2beta2"),
        ("replicas.yaml", "averageValue: 800m", "averageValue: [800m]"),
        ("replicas.yaml", "kind: PodDisruptionBudget", "kind: PodDisruptionBudgets"),
        ("group.yaml", "restartPolicy: None", "restartPolicy: Never"),
        ("group.yaml", "    size: 3", "    sizes: 3"),
        ("group.yaml", "    workerTemplate:", "    workersTemplate:"),
        ("group.yaml", "sleep: {seconds: 135}", "sleep: 135"),
        ("group.yaml", "fieldRef: {fieldPath: status.podIP}", "fieldRef: status.podIP"),
    ],
)
def test_a_manifest_that_does_not_fit_is_found(name, old, new):
    text = read(name)
    assert old in text and misfits(documents(text.replace(old, new)), VERSIONS[-1:]) != []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("server.yaml", "  selector: {app.kubernetes.io/name: engine,", "  selector: {app.kubernetes.io/name: motor,"),
        ("server.yaml", "targetPort: http", "targetPort: web"),
        ("server.yaml", "{path: /health, port: http}", "{path: /health, port: web}"),
        ("server.yaml", "--port=8000", "--port=8001"),
        ("server.yaml", "terminationGracePeriodSeconds: 150", "terminationGracePeriodSeconds: 120"),
        ("server.yaml", "claimName: engine-models", "claimName: models"),
        ("server.yaml", "mountPath: /models", "mountPath: /model"),
        ("server.yaml", "mountPath: /etc/engine,", "mountPath: /etc/motor,"),
        ("server.yaml", "{name: scratch, mountPath: /tmp}", "{name: scraps, mountPath: /tmp}"),
        ("replicas.yaml", "kind: StatefulSet, name: engine-replica", "kind: StatefulSet, name: engine"),
        ("replicas.yaml", "maxReplicas: 4", "maxReplicas: 3"),
        ("replicas.yaml", "maxReplicas: 4", "maxReplicas: 5"),
        ("replicas.yaml", "engine-replica-3.engine-replica:8000", "engine-replica-3.engine:8000"),
        ("replicas.yaml", "clusterIP: None", "clusterIP: 10.0.0.1"),
        ("disaggregation.yaml", "peers=engine-prefill-0.", "peers=engine-prefill-1."),
        ("disaggregation.yaml", "containerPort: 14579", "containerPort: 14580"),
        ("group.yaml", "size: 3", "size: 2"),
        ("group.yaml", "containerPort: 9400", "containerPort: 9401"),
        ("group.yaml", "(LWS_LEADER_ADDRESS):9400", "(LWS_LEADER_ADDRESS):9401"),
        ("group.yaml", "(POD_IP):9400", "(POD_IPS):9400"),
        ("group.yaml", "--token-file=/run/engine/token", "--token-file=/etc/engine-nodes/token"),
        ("group.yaml", "/run/engine/token]", "/run/engine/secret]"),
        ("group.yaml", "name: engine-group-leader", "name: engine-group"),
        ("group.yaml", "sleep: {seconds: 135}", "sleep: {seconds: 120}"),
        ("group.yaml", "sleep: {seconds: 135}", "sleep: {seconds: 145}"),
    ],
)
def test_a_name_that_leads_nowhere_is_found(name, old, new):
    text = read(name)
    assert old in text and loose_ends(documents(text.replace(old, new))) != []


# -- the command lines -------------------------------------------------------------------------------------------------
def unknown(container: dict[str, Any]) -> list[str]:
    """What the program would not take of a container's arguments: flags, their values, options of the connector."""
    faults = []
    try:
        commands.parse(command_line(container))
        name, *rest = commands.words(command_line(container))[1:]
        arguments = commands.parser_of(name).parse_args(canonical(rest))
        if name == "join":
            return faults  # its flags are the parser's
        if name == "serve":
            name_positional_model(arguments, name)
        merged = merged_settings(arguments)
        if name == "serve":
            give_role(merged)
            EngineConfig.from_merged(merged)
            ServerConfig.from_merged(merged)
        else:
            read_config(merged)
    except (ValueError, SystemExit, argparse.ArgumentError, EngineError) as error:
        faults.append(str(error))
    for point, options in (("kv-connector", TCPOptions), ("nodes", AgentOptions)):
        given = {name: flag(container, f"{point}.{name}")[0] for name in options_of(container, point)}
        try:
            options.model_validate(given)
        except ValueError as error:
            faults.append(str(error))
    return faults


def options_of(container: dict[str, Any], point: str) -> list[str]:
    """The options of this point's driver that are set."""
    return re.findall(rf"--{point}\.(\w+)=", " ".join(container["args"]))


def programs(found: Documents) -> list[dict[str, Any]]:
    """The containers of workloads, and of the workers of a LeaderWorkerSet."""
    workers = [container for one in named(found, "Pod") for container in one["spec"]["containers"]]
    return [*(container for _, container in containers(found)), *workers]


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_program_takes_the_arguments(name):
    for container in programs(documents(read(name))):
        assert unknown(container) == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("server.yaml", "--shutdown-timeout=", "--shutdown-time="),
        ("server.yaml", "--log-format=json", "--log-format=xml"),
        ("server.yaml", "--kv-cache-memory=8GiB", "--kv-cache-memory=8Gigs"),
        ("replicas.yaml", "--backend=http://engine-replica-0", "--prefill=http://engine-replica-0"),
        ("replicas.yaml", "--backend=", "--backends="),
        ("disaggregation.yaml", "--kv-connector.advertise=", "--kv-connector.advertised="),
        ("disaggregation.yaml", "--kv-role=decode", "--kv-role=decoder"),
        ("group.yaml", "--nodes.count=2", "--nodes.counts=2"),
        ("group.yaml", "--nodes.count=2", "--nodes.count=two"),
        ("group.yaml", "--pipeline-parallel-size=", "--pipeline-size="),
        ("group.yaml", "--token-file=", "--token_files="),
    ],
)
def test_an_argument_that_is_not_taken_is_found(name, old, new):
    text = read(name)
    found = documents(text.replace(old, new))
    assert old in text and any(unknown(container) for container in programs(found))


# -- the containers ----------------------------------------------------------------------------------------------------
def instructions(text: str) -> list[tuple[str, str]]:
    """A Containerfile's, in order."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    return [(word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in lines)]


def pip_paths(text: str) -> set[str]:
    """The folders of this repository that are installed."""
    installed = [rest for word, rest in instructions(text) if word == "RUN" and rest.startswith("pip install")]
    return {word for line in installed for word in shlex.split(line) if word == "." or word.startswith("./")}


def containerfile_faults(text: str, extra: tuple[str, ...]) -> list[str]:
    """What is not there, or not as the manifests need it."""
    faults = []
    steps = instructions(text)
    with (ROOT / "pyproject.toml").open("rb") as file:
        asked = {one.partition("==")[0] for one in tomllib.load(file)["project"]["dependencies"]} | {"engine"}
    have = set()
    for path in pip_paths(text):
        file = ROOT / path / "pyproject.toml"
        have.add(tomllib.loads(file.read_text())["project"]["name"] if file.is_file() else f"nothing at {path}")
    if have != asked | set(extra):
        faults.append(f"other packages: {sorted(have ^ (asked | set(extra)))}")
    copied = [rest.split()[:-1] for word, rest in steps if word == "COPY" and not rest.startswith("--from")]
    sources = [one for several in copied for one in several]
    faults += [f"there is no {one}" for one in sources if not (ROOT / one).exists()]
    for path in pip_paths(text) - {"."}:
        if not any(path.removeprefix("./") == one or path.startswith(f"./{one}/") for one in sources):
            faults.append(f"{path} is not copied")
    (pin,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    if f"pip install {pin}" not in text:
        faults.append(f"not {pin}")
    last = dict(steps)
    with (ROOT / "core" / "pyproject.toml").open("rb") as file:
        programs = tomllib.load(file)["project"]["scripts"]
    program, arguments = json.loads(last["ENTRYPOINT"]), json.loads(last["CMD"])
    if len(program) != 1 or program[0] not in programs:
        faults.append(f"no package brings {program}")
    try:
        commands.parse(shlex.join([*program, *arguments]))
    except (ValueError, SystemExit, IndexError) as error:
        faults.append(f"{arguments}: {error}")
    users = {(spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsGroup"]) for spec in all_pods()}
    if {last["USER"]} != {
        f"{user}:{group}" for user, group in users
    } or f"--uid {last['USER'].split(':')[0]}" not in text:
        faults.append(f"another user than the manifests': {last['USER']}")
    return faults


def all_pods() -> list[dict[str, Any]]:
    return [pod(workload) for name in MANIFESTS for workload in named(documents(read(name)), *WORKLOADS)]


CONTAINERFILES = {"Containerfile": ("engine-router", "engine-connectors", "engine-nodes")}
CONTAINERFILES["Containerfile.cuda"] = (*CONTAINERFILES["Containerfile"], "engine-cuda")


@pytest.mark.parametrize("name", CONTAINERFILES)
def test_containerfiles_install_what_there_is(name):
    assert containerfile_faults((ROOT / name).read_text(), CONTAINERFILES[name]) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("./plugins/moe ", ""),
        ("./plugins/moe ", "./plugins/experts "),
        ("COPY sdk/kit sdk/kit\n", ""),
        ("COPY requirements.txt", "COPY needs.txt"),
        ("torch==2.13.0", "torch==2.12.0"),
        ('ENTRYPOINT ["engine"]', 'ENTRYPOINT ["motor"]'),
        ('"--host"', '"--hosts"'),
        ("USER 10001:10001", "USER 0:0"),
    ],
)
def test_what_is_wrong_with_a_containerfile_is_found(old, new):
    text = (ROOT / "Containerfile").read_text()
    assert old in text
    assert containerfile_faults(text.replace(old, new), CONTAINERFILES["Containerfile"]) != []


# -- what runs ---------------------------------------------------------------------------------------------------------
def container_of(name: str, command: str) -> dict[str, Any]:
    """The first of a file that runs this command."""
    return next(c for _, c in containers(documents(read(name))) if c["args"][0] == command)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The server of server.yaml, with the bundled model and little memory, and the router of replicas.yaml in front of
    it and of pods that are not there; each has answered a request."""
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("- a-key-of-the-tests\n")
    own = {"/models/chat": "tiny", "--kv-cache-memory=8GiB": "--kv-cache-memory=64MiB"}
    own["--api-key-file=/etc/engine/keys.yaml"] = f"--api-key-file={keys}"
    given = container_of("server.yaml", "serve")["args"][1:]
    assert set(own) <= set(given)
    server = Server(*(own.get(one, one) for one in given))
    try:
        flags = container_of("replicas.yaml", "route")["args"][1:]
        router = Server(*flags, f"--backend={server.address}", command="route")
        try:
            body = {"model": "chat", "prompt": "Once", "max_tokens": 4}
            headers = {"authorization": "Bearer a-key-of-the-tests"}
            answers = [
                httpx.post(f"{one.address}/v1/completions", json=body, headers=sent, timeout=60).status_code
                for one, sent in ((server, {}), (server, headers), (router, headers))
            ]
            yield SimpleNamespace(serve=server, route=router, answers=answers)
        finally:
            assert router.stop() == 0, "".join(router.lines)
    finally:
        assert server.stop() == 0, "".join(server.lines)


@pytest.mark.slow
def test_a_group_serves_with_its_workers(tmp_path):
    """By the command lines of group.yaml, with the bundled model and little memory, all at one address."""
    (tmp_path / "keys.yaml").write_text("- a-key-of-the-tests\n")
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text(secrets.token_urlsafe(32))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found = documents(read("group.yaml"))
    (leader,), (worker,) = ([c for c in programs(found) if c["args"][0] == name] for name in ("serve", "join"))

    def own(container: dict[str, Any]) -> list[str]:
        text = "\n".join(container["args"][1:]).replace("--kv-cache-memory=8GiB", "--kv-cache-memory=64MiB")
        text = re.sub(r"\$\(\w+\):9400", f"127.0.0.1:{port}", text).replace("/models/chat", "tiny")
        return text.replace("/run/engine", str(tmp_path)).replace("/etc/engine", str(tmp_path)).split("\n")

    with contextlib.ExitStack() as at_end:
        for name in ("one", "two"):
            command = [sys.executable, "-m", "engine", "join", *own(worker), "--node-name", name]
            at_end.callback(subprocess.Popen.terminate, at_end.enter_context(subprocess.Popen(command)))
        server = Server(*own(leader))
        at_end.callback(server.stop)
        until = time.monotonic() + 60
        while httpx.get(f"{server.address}/ready", timeout=30).status_code != 200:
            assert time.monotonic() < until and server.process.poll() is None, "".join(server.lines)
            time.sleep(0.1)
        body = {"model": "chat", "prompt": "Once", "max_tokens": 4}
        headers = {"authorization": "Bearer a-key-of-the-tests"}
        answer = httpx.post(f"{server.address}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
        assert {"one", "two"} <= set(re.findall(r"core0:rank\d stage\d tp0: (\w+)", "".join(server.lines)))


def test_keys_of_the_secret_let_clients_in(running):
    assert running.answers == [401, 200, 200]


def unanswered(found: Documents, running: SimpleNamespace) -> list[str]:
    """Probes to which a program that serves does not say 200."""
    return [
        f"{container['name']} {path}"
        for _, container in containers(found)
        for path in {probe["httpGet"]["path"] for name, probe in container.items() if name.endswith("Probe")}
        if httpx.get(getattr(running, container["args"][0]).address + path, timeout=30).status_code != 200
    ]


@pytest.mark.parametrize("name", MANIFESTS)
def test_probes_ask_for_routes_that_are_there(name, running):
    found = documents(read(name))
    assert all("readinessProbe" in container and "livenessProbe" in container for _, container in containers(found))
    assert unanswered(found, running) == []
    assert unanswered(documents(read(name).replace("/ready", "/readyz")), running) != []


# -- the metrics -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def exposed(running) -> Exposed:
    """The labels of each metric of the server and of the router. Of those that count nothing yet none is known: `*`."""
    found: dict[str, set[str]] = {}
    for address, keep in ((running.serve.address, ("engine:", "process_")), (running.route.address, "engine_router:")):
        for family in text_string_to_metric_families(httpx.get(address + "/metrics", timeout=30).text):
            if family.name.startswith(keep):
                found.setdefault(family.name + "_total" * (family.type == "counter"), {"*"})
                for sample in family.samples:
                    labels = found.setdefault(sample.name, set())
                    labels.discard("*")
                    labels.update(sample.labels)
    return found


def selectors(expression: promql.Expr) -> list[promql.VectorSelector]:
    found = []

    def visit(node: Any) -> bool:
        if isinstance(node, (promql.VectorSelector, promql.MatrixSelector)):
            found.append(getattr(node, "vector_selector", node))
        return True

    promql.walk(expression, visit)
    return found


def labels_of(expression: Any, exposed: Exposed) -> set[str]:
    """What the result is labelled with; `*` where that is not known."""
    match expression:
        case promql.AggregateExpr():
            return set(expression.modifier.labels) if expression.modifier else set()
        case promql.BinaryExpr():
            return labels_of(expression.lhs, exposed)
        case promql.ParenExpr():
            return labels_of(expression.expr, exposed)
        case promql.Call():
            inner = labels_of(expression.args[-1], exposed)
            return inner - {"le"} if expression.func.name == "histogram_quantile" else inner
        case promql.MatrixSelector():
            return labels_of(expression.vector_selector, exposed)
        case promql.VectorSelector():
            return TARGET_LABELS | ({"*"} if expression.name == "up" else exposed.get(expression.name, set()))
        case _:
            return set()


def untrue(text: str, exposed: Exposed) -> list[str]:
    """What an expression of PromQL asks for and nobody shows: metrics, and labels of metrics."""
    try:
        expression = promql.parse(text)
    except ValueError as error:
        return [f"{text}: {error}"]
    faults = [f"{one.name} is not shown" for one in selectors(expression) if one.name not in {*exposed, "up"}]
    for one in selectors(expression):
        have = labels_of(one, exposed)
        asked = {matcher.name for matcher in one.matchers.matchers}
        faults += [f"{one.name} has no label {name}" for name in asked - have if "*" not in have]
        jobs = {config["job_name"] for config in yaml.safe_load(read("prometheus.yaml"))["scrape_configs"]}
        for matcher in one.matchers.matchers:
            if matcher.name == "job":
                faults += [f"there is no job {job}" for job in set(matcher.value.split("|")) - jobs]

    def visit(node: Any) -> bool:
        if isinstance(node, promql.AggregateExpr) and node.modifier:
            have = labels_of(node.expr, exposed)
            missing = set(node.modifier.labels) - have
            faults.extend(f"by {name}, which {node.expr} does not have" for name in missing if "*" not in have)
        return True

    promql.walk(expression, visit)
    return faults


RULE = {"alert", "expr", "for", "labels", "annotations"}
"""What Prometheus takes of a rule that alerts, as far as it is used."""


def alert_faults(text: str, exposed: Exposed) -> list[str]:
    faults = []
    for rule in [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]:
        faults += untrue(rule["expr"], exposed)
        have = set() if faults else labels_of(promql.parse(rule["expr"]), exposed)
        told = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        faults += [f"{rule['alert']} tells of {name}" for name in told - have if "*" not in have]
        faults += [f"{rule['alert']} has no {key}" for key in {"summary", "description"} - rule["annotations"].keys()]
        faults += [
            f"{rule['alert']}: {key}?" for key in rule.keys() - {"alert", "expr", "for", "labels", "annotations"}
        ]
        known = set(re.findall(r"engine(?:_router)?:\w+", rule["annotations"].get("description", "")))
        faults += [f"{rule['alert']} names {name}" for name in known - exposed.keys()]
    return faults


def dashboard_faults(text: str, exposed: Exposed) -> list[str]:
    faults = []
    dashboard = json.loads(text)
    panels, variables = dashboard["panels"], dashboard["templating"]["list"]
    names = {variable["name"] for variable in variables}
    faults += [f"{what} twice" for what in ("id", "title") if len({p[what] for p in panels}) != len(panels)]
    cells = [(p["gridPos"]["x"] + x, p["gridPos"]["y"] + y) for p in panels for x in range(8) for y in range(8)]
    if len(set(cells)) != len(cells) or max(x for x, _ in cells) > 23:
        faults.append("panels overlap, or leave the page")
    for panel in panels:
        for target in panel["targets"]:
            used = set(re.findall(r"\$\{?(\w+)", target["expr"] + target["datasource"]["uid"]))
            faults += [f"there is no variable {name}" for name in used - names - {"__rate_interval"}]
            expression = re.sub(r"\$(?!__)\w+", "x", target["expr"].replace("$__rate_interval", "5m"))
            wrong = untrue(expression, exposed)
            have = set() if wrong else labels_of(promql.parse(expression), exposed)
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            faults += [*wrong, *(f"{panel['title']}: no label {name}" for name in shown - have if "*" not in have)]
    for variable in variables:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variable["query"]["query"]).groups()
            faults += [f"{metric} has no {label}"] * (label not in exposed.get(metric, set()) | TARGET_LABELS)
    return faults


def adapter_faults(text: str, exposed: Exposed) -> list[str]:
    """What HorizontalPodAutoscalers ask for and the adapter does not have, or what it takes from nowhere."""
    faults = []
    rules = yaml.safe_load(text)["rules"]
    for rule in rules:
        faults += untrue(rule["seriesQuery"], exposed)
        series = promql.parse(rule["seriesQuery"]).name
        query = rule["metricsQuery"].replace("<<.Series>>", series).replace("<<.LabelMatchers>>", 'pod="a"')
        faults += untrue(query.replace("<<.GroupBy>>", "pod"), exposed)
        faults += [f"not by {name}" for name in {"namespace", "pod"} ^ rule["resources"]["overrides"].keys()]
    autoscalers = named([one for name in MANIFESTS for one in documents(read(name))], "HorizontalPodAutoscaler")
    asked = {metric["pods"]["metric"]["name"] for one in autoscalers for metric in one["spec"]["metrics"]}
    assert asked
    return [*faults, *(f"{name} is asked for, or made, alone" for name in asked ^ {r["name"]["as"] for r in rules})]


METRIC_FILES: dict[str, Callable[[str, Exposed], list[str]]] = {
    "alerts.yaml": alert_faults,
    "dashboard.json": dashboard_faults,
    "prometheus-adapter.yaml": adapter_faults,
}


@pytest.mark.parametrize("name", METRIC_FILES)
def test_metrics_are_shown(name, exposed):
    assert len(exposed) > 60 and exposed["engine_router:backend_up"] == {"backend", "role"}
    assert METRIC_FILES[name](read(name), exposed) == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("alerts.yaml", "engine:kv_cache_usage_perc", "engine:kv_cache_usage_percent"),
        ("alerts.yaml", "engine:time_to_first_token_seconds_bucket", "engine:time_to_first_token_seconds_buckets"),
        ("alerts.yaml", 'code="500"', 'status="500"'),
        ("alerts.yaml", "sum by (namespace, pod, backend)", "sum by (namespace, pod, server)"),
        ("alerts.yaml", "rate(engine:num_preemptions_total[10m])", "rate(engine:num_preemptions_total)"),
        ("alerts.yaml", "Core {{ $labels.engine }}", "Core {{ $labels.core }}"),
        ("alerts.yaml", 'job=~"engine|', 'job=~"motor|'),
        ("alerts.yaml", "engine:quarantined_plugin_info names", "engine:broken_plugin_info names"),
        ("dashboard.json", "engine:num_requests_running{", "engine:requests_running{"),
        ("dashboard.json", "sum by (source)", "sum by (origin)"),
        ("dashboard.json", '"{{finished_reason}}"', '"{{reason}}"'),
        ("dashboard.json", "$namespace", "$space"),
        ("dashboard.json", "_running, model_name)", "_running, model)"),
        ("prometheus-adapter.yaml", "engine:num_requests_waiting{", "engine:num_requests_queued{"),
        ("prometheus-adapter.yaml", "{as: engine_kv_cache_usage_perc}", "{as: engine_kv_cache}"),
    ],
)
def test_a_metric_that_is_not_shown_is_found(name, old, new, exposed):
    text = read(name)
    assert old in text and METRIC_FILES[name](text.replace(old, new), exposed) != []


def scraped(config: dict[str, Any]) -> set[str]:
    """The workloads whose pods a job of Prometheus keeps."""
    kept = set()
    for name in MANIFESTS:
        for workload, container in containers(documents(read(name))):
            labels = workload["spec"]["template"]["metadata"]["labels"]
            meta = {f"__meta_kubernetes_pod_label_{re.sub(r'[^a-z0-9]', '_', key)}": v for key, v in labels.items()}
            for port in container["ports"]:
                meta["__meta_kubernetes_pod_container_port_name"] = port["name"]
                rules = [rule for rule in config["relabel_configs"] if rule.get("action") == "keep"]
                if all(re.fullmatch(rule["regex"], meta.get(rule["source_labels"][0], "")) for rule in rules):
                    kept.add((name, workload["metadata"]["name"], port["name"]))
    return kept


def test_every_pod_is_scraped_once_and_labelled():
    jobs = {config["job_name"]: config for config in yaml.safe_load(read("prometheus.yaml"))["scrape_configs"]}
    expected: dict[str, set[tuple[str, str, str]]] = {"engine": set(), "engine-router": set()}
    for name in MANIFESTS:
        for workload, container in containers(documents(read(name))):
            job = "engine" if container["args"][0] == "serve" else "engine-router"
            expected[job].add((name, workload["metadata"]["name"], "http"))
    assert {name: scraped(config) for name, config in jobs.items()} == expected
    for config in jobs.values():
        targets = {rule["target_label"] for rule in config["relabel_configs"] if "target_label" in rule}
        assert targets | {"job", "instance"} == TARGET_LABELS
    (rule,) = jobs["engine-router"]["metric_relabel_configs"]
    assert rule["action"] == "keep" and re.fullmatch(rule["regex"], "engine_router:backend_up")
    assert not re.fullmatch(rule["regex"], "engine:num_requests_running")
    assert yaml.safe_load(read("prometheus.yaml"))["rule_files"] == ["alerts.yaml"]
    assert Path(FOLDER / "alerts.yaml").is_file()
