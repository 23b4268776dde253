"""The Helm chart: templates, Kubernetes schemas, and the settings that the program receives."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts.schema import schema
from charts.values import comments
from janitor.app.hbase_place import HBasePlace
from janitor.app.leveldb_place import LevelDBPlace
from janitor.settings import AllSettings, load
from tests.chart.programs import CHART, KUBERNETES, run, template
from tests.chart.schemas import FOLDER
from tms_core.clock import SystemClock
from tms_core.settings.fields import fields

SCHEMAS = Path(__file__).with_name("recorded")
#: The oldest supported Kubernetes, the version of the tests' node, and the newest.
VERSIONS = sorted(folder.name for folder in SCHEMAS.iterdir() if folder.is_dir())
EXAMPLES = sorted((CHART / "ci").glob("*.yaml"))


def parse(rendered: str) -> list[dict[str, Any]]:
    return [document for document in yaml.load_all(rendered, yaml.CSafeLoader) if document]


def objects(*words: object) -> list[dict[str, Any]]:
    made = template(*words)
    assert made.returncode == 0, made.stderr
    return parse(made.stdout)


def settings_of(documents: list[dict[str, Any]], folder: Path, environ: dict[str, str] | None = None) -> AllSettings:
    """Return the settings that the program reads from the chart's ConfigMap."""
    config = next(d for d in documents if d["kind"] == "ConfigMap" and "tms.yaml" in d["data"])
    file = folder / "tms.yaml"
    file.write_text(config["data"]["tms.yaml"], encoding="utf-8")
    return load(file, environ or {}, {}).settings


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for document in documents:
        spec = document.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        if document["kind"] == "Pod":
            found.append(document)
        elif "template" in spec:
            found.append(spec["template"])
    return found


def test_helm_lint_of_the_chart_passes(example: Path) -> None:
    for values in ([], ["--values", example]):
        linted = run("helm", "lint", "--strict", "--quiet", "--kube-version", KUBERNETES, CHART, *values)
        assert linted.returncode == 0, linted.stdout + linted.stderr


def test_helm_4_lint_passes_and_renders_the_same_objects(example: Path) -> None:
    linted = run("helm4", "lint", "--strict", "--quiet", "--kube-version", KUBERNETES, CHART, "--values", example)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    words = ("template", "x", CHART, "--namespace", "apps", "--kube-version", KUBERNETES, "--values", example)
    three, four = (parse(run(helm, *words).stdout) for helm in ("helm", "helm4"))
    assert four == three != []


def conforms(text: str, version: str = FOLDER.name) -> tuple[int, str]:
    """Return the exit code and the complaints of kubeconform about objects."""
    places = [f"{folder}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json" for folder in (SCHEMAS / version, SCHEMAS)]
    locations = [word for place in places for word in ("-schema-location", place)]
    checked = run("kubeconform", "-strict", "-kubernetes-version", f"{version}.0", *locations, "-summary", given=text)
    return checked.returncode, checked.stdout + checked.stderr


def test_objects_conform_to_the_oldest_and_newest_kubernetes(example: Path) -> None:
    made = template("--values", example)
    assert made.returncode == 0, made.stderr
    oldest = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["kubeVersion"]
    assert oldest == f">={VERSIONS[0]}.0-0"
    for version in VERSIONS:
        code, output = conforms(made.stdout, version)
        assert code == 0, (version, output)
        assert "Skipped: 0" in output


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("concurrencyPolicy", "concurencyPolicy"),
        ("replicas: 1", "replicas: one"),
        ("severity:", "1:"),
        ("expr:", "exp:"),
    ],
)
def test_conformance_check_rejects_an_invalid_object(right: str, wrong: str) -> None:
    made = template("--values", CHART / "ci/cronjob-values.yaml").stdout
    assert right in made
    assert conforms(made)[0] == 0
    broken = (
        made.replace(f"labels:\n        {right}", f"lables:\n        {right}")
        if wrong == "1:"
        else made.replace(right, wrong)
    )
    assert conforms(broken)[0] == 1


def test_helm_unittest_suites_pass() -> None:
    tested = run("helm-unittest", "--strict", CHART)
    assert tested.returncode == 0, tested.stdout
    assert re.search(r"Tests: +[1-9]\d+ passed", tested.stdout)


def test_program_reads_the_settings_of_the_chart(example: Path, tmp_path: Path) -> None:
    given = yaml.safe_load(example.read_text(encoding="utf-8"))
    settings = settings_of(objects("--values", example), tmp_path)
    assert settings.janitor.apply == given.get("janitor", {}).get("apply", False)
    assert settings.storage.kind == given["storage"].get("kind", "hbase")
    assert settings.janitor.http.host == "0.0.0.0"  # noqa: S104


@pytest.mark.parametrize(
    "words",
    [
        ("--values", CHART / "ci/embedded-values.yaml", "--set", "storage.leveldb.path=/var/lib/tms/x//y/"),
        ("--values", CHART / "ci/cronjob-values.yaml"),
        ("--set", "decisions.adopt=a,storage.hbase.thrift={a:1,b:2},storage.hbase.namespace=other"),
    ],
)
def test_decision_names_the_store_that_the_program_finds(words: tuple[object, ...], tmp_path: Path) -> None:
    documents = objects(*words)
    [job] = [d for d in documents if d["kind"] == "Job" and "adopt" in d["metadata"]["name"]]
    spec = job["spec"]["template"]["spec"]
    [args] = [container["args"] for container in spec["containers"]]
    mounted = next(volume for volume in spec["volumes"] if volume["name"] == "config")["configMap"]["name"]
    made_for_it = [d for d in documents if d["kind"] == "ConfigMap" and d["metadata"]["name"] == mounted]
    settings = settings_of(made_for_it, tmp_path)
    assert settings == settings_of([d for d in documents if d not in made_for_it], tmp_path)
    storage = settings.storage
    place = (
        HBasePlace(storage.hbase, SystemClock())
        if storage.kind == "hbase"
        else LevelDBPlace(Path(storage.leveldb.path), Path(settings.janitor.state))
    )
    assert args[args.index("--expect-store") + 1] == place.name


def test_changed_settings_rename_the_config_map_of_a_decision() -> None:
    def mounted_config(*words: str) -> str:
        [pod] = [pod for pod in pods(objects("--set", "decisions.adopt=a", *words)) if "adopt" in str(pod["spec"])]
        return str(pod["spec"]["volumes"][0]["configMap"]["name"])

    assert mounted_config() == mounted_config("--set", "podLabels.a=b")
    assert mounted_config() != mounted_config("--set", "storage.hbase.thrift={other:9090}")


def test_every_setting_of_the_program_is_a_value_of_the_chart() -> None:
    made = schema()
    for path, _ in fields(AllSettings):
        node: Any = made
        for name in path.split("."):
            reference = node.get("$ref") or next(
                (each["$ref"] for each in node.get("anyOf", []) if "$ref" in each), None
            )
            node = made["$defs"][reference.rpartition("/")[2]] if reference else node
            node = node["properties"][name]
        assert node, path


def test_every_value_is_explained_and_in_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    described, made = comments(), schema()
    sections = ("storage", "transactions", "janitor", "server")
    for name, value in values.items():
        if name in described:
            continue
        assert isinstance(value, dict), name
        assert [f"{name}.{inner}" for inner in value if f"{name}.{inner}" not in described] == []
    assert set(values) | {"global"} == set(made["properties"])
    own = [path for path in described if path.partition(".")[0] not in sections]
    assert len(own) > 60


SERVER = "server.enabled=true,server.auth.kind=jwt,server.auth.key_file=/key"
TRANSACTIONS = "transactions.source=manager,transactions.token_file=/etc/tms-secrets/transactions,existingSecret=keys"
MANAGER = f"{SERVER},{TRANSACTIONS},persistence.enabled=true"
TLS = (
    "server.tls.certificate=/c,server.tls.key=/k,server.leader.ca_file=/ca,"
    "transactions.tls.certificate=/c,transactions.tls.key=/k,transactions.ca_file=/ca"
)
VOLUME = f"{MANAGER},storage.kind=leveldb"
SWEEP = "spark.enabled=true,spark.image=s:1,spark.command={sweep}"
SHARED = "persistence.enabled=true,persistence.accessModes={ReadWriteMany}"
ARCHIVED = f"mode=cronjob,{SWEEP},{SHARED},janitor.archive.enabled=true"


@pytest.mark.parametrize(
    "options",
    [
        f"{MANAGER},janitor.archive.enabled=true,persistence.accessModes={{ReadWriteMany}}",
        f"{MANAGER},storage.hbase.namespace=other",
        f"{SERVER},transactions.source=manager,transactions.allow_without_token=true,persistence.enabled=true",
        f"{VOLUME},janitor.archive.enabled=true,decisions.adopt=a",
        f"{VOLUME},persistence.accessModes={{ReadWriteOncePod}}",
        f"{SERVER},serverReplicas=2",
        f"{SERVER},serverReplicas=2,server.leader.slots=16",
        f"{SERVER},serverReplicas=2,{TRANSACTIONS},transactions.directory=/srv/tx",
        f"{SERVER},serverReplicas=2,server.leader.slots=16,{TRANSACTIONS}",
        f"{MANAGER},server.leader.slots=2,janitor.archive.enabled=true",
        f"{MANAGER},server.leader.advertise=http://x-tms-janitor-server:11015",
        f"{MANAGER},serverReplicas=2,{TLS}",
        f"mode=cronjob,{SWEEP}",
        ARCHIVED,
        f"{ARCHIVED},spark.master=k8s://https://a",
        "spark.enabled=true,spark.image=s:1,persistence.enabled=true,janitor.archive.enabled=true",
        "janitor.cron=1 * * * *",
        "podLabels.app\\.kubernetes\\.io/part-of=cdap",
        "extraEnv[0].name=A,extraEnv[0].valueFrom.fieldRef.fieldPath=status.podIP",
        "prometheusRule.enabled=true,prometheusRule.runbookUrl=https://wiki/a?b=c",
        "storage.hbase.thrift={[fd00::1]:9090}",
        # Values of arbitrary objects, and values of the other kind of store.
        "resources=null,securityContext.runAsUser=null,podSecurityContext=null,cronjob.activeDeadlineSeconds=null",
        "storage.leveldb=null,service.annotations=null,dashboard.labels=null",
        f"{VOLUME},storage.hbase=null",
    ],
)
def test_compatible_values_are_accepted(options: str) -> None:
    made = template("--set", options)
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize("authenticate", [True, False])
def test_spark_settings_reach_spark_unchanged(tmp_path: Path, authenticate: bool) -> None:
    conf = {"a.bytes": 134217728, "b.share": 0.5, "c.on": True, "d.options": '-Da=1 -Db="it\'s"'}
    if not authenticate:
        conf["spark.authenticate"] = False
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"spark": {"enabled": True, "image": "s:1", "conf": conf}}), encoding="utf-8")
    [pod] = [pod for pod in pods(objects("--values", values)) if "spark" in pod["spec"]["containers"][0]["name"]]
    env = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
    conf["spark.authenticate"] = authenticate
    options = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in conf.items()]
    assert shlex.split(env["PYSPARK_SUBMIT_ARGS"]) == [
        *(w for each in options for w in ("--conf", each)),
        "pyspark-shell",
    ]


@pytest.mark.parametrize(
    ("options", "about"),
    [
        ("janitor.aply=true", "aply"),
        ("janitor.every_seconds=often", "every_seconds"),
        ("storage.kind=memory", "kind"),
        ("storage.kind=leveldb", "leveldb|server|persistence"),
        ("storage.kind=leveldb,server.enabled=true,server.auth.kind=jwt,persistence.enabled=true,mode=cronjob", "mode"),
        ("storage.kind=leveldb,server.enabled=true,server.auth.kind=jwt", "persistence"),
        ("server.enabled=true", "auth"),
        ("server.enabled=true,server.auth.kind=jwt", "key_file"),
        ("server.enabled=true,server.auth.kind=tokens", "tokens_file"),
        (f"{MANAGER},janitor.archive.enabled=true", "accessModes"),
        (f"{MANAGER},server.port=15165", "server/port"),
        (f"{MANAGER},transactions.directory=/srv/tx", "directory"),
        (f"mode=cronjob,{SWEEP},persistence.enabled=true,janitor.archive.enabled=true", "accessModes"),
        (f"mode=deployment,{SWEEP}", "spark/command"),
        (f"{ARCHIVED},spark.master=spark://a:7077", "spark/master"),
        (f"{ARCHIVED},spark.master=sc://a", "spark/master"),
        (f"{VOLUME},persistence.accessModes={{ReadWriteOncePod}},decisions.adopt=a", "accessModes"),
        (
            f"{VOLUME},persistence.accessModes={{ReadWriteOncePod}},decisions.approve[0].id=a,decisions.approve[0].all=true",
            "accessModes",
        ),
        ("decisions.approve[0].id=a", "approve"),
        (f"{VOLUME},storage.leveldb.path=/srv/messaging", "leveldb/path"),
        (f"{VOLUME},janitor.state=/srv/janitor", "state"),
        ("persistence.enabled=true,janitor.archive.enabled=true,janitor.archive.path=/srv", "archive/path"),
        ("janitor.canary.enabled=true", "canary"),
        ("janitor.http.port=0", "http/port"),
        ("server.port=0", "server/port"),
        ("janitor.http.host=localhost", "http/host"),
        ("server.host=127.0.0.1", "server/host"),
        ("janitor.cron=1 * * * *,janitor.every_seconds=60", "every_seconds"),
        ("transactions.source=manager", "server"),
        ("janitor.archive.enabled=true", "persistence"),
        ("serverReplicas=2,transactions.source=directory", "source"),
        (f"{VOLUME},serverReplicas=2", "Several servers need a store and a transaction log in HBase"),
        (f"{SERVER},{TRANSACTIONS},server.leader.slots=65", "slots"),
        (f"{SERVER},{TRANSACTIONS},serverReplicas=2,server.port=15165", "server/port"),
        (f"{SERVER},{TRANSACTIONS}", "log needs a persistent volume"),
        (f"{SERVER},transactions.source=manager,persistence.enabled=true", "needs a `token_file`"),
        (f"{SERVER},transactions.source=manager,serverReplicas=2", "needs a `token_file`"),
        ("transactions.source=manager,serverReplicas=2", "server"),
        (f"{SERVER},server.leader.slots=65", "slots"),
        ("spark.enabled=true", "spark"),
        ("serverReplicas=0", "serverReplicas"),
        ("mode=daemonset", "mode"),
        ("replicaCount=2", "replicaCount"),
        ("prometheusRule.thresholds.pausedSecs=1", "pausedSecs"),
        ("image.digest=abc", "digest"),
        ("service.type=LoadBalancer", "type"),
        ("extraEnv[0].name=A,extraEnv[0].value=true", "extraEnv/0/value"),
        ("extraEnv[0].value=a", "extraEnv/0.*name"),
        ("podLabels.app\\.kubernetes\\.io/component=x", "podLabels"),
        ("commonLabels.app\\.kubernetes\\.io/name=x", "commonLabels"),
        ("dashboard.labels.helm\\.sh/chart=x", "dashboard/labels"),
        ("storage.hbase.thrift={hbase-thrift}", "hbase/thrift/0"),
        ("storage.hbase.thrift2={hbase-thrift}", "hbase/thrift2/0"),
        ("transactions.thrift=cdap-tx", "transactions/thrift"),
        ("prometheusRule.runbookUrl=https://wiki/a: b", "runbookUrl"),
        ("prometheusRule.runbookUrl=https://wiki/a #b", "runbookUrl"),
        ("prometheusRule.job=a: b", "job"),
    ],
)
def test_conflicting_values_are_rejected(options: str, about: str) -> None:
    made = template("--set", options)
    assert made.returncode == 1
    assert re.search(about, made.stderr)


def test_error_of_conflicting_values_names_the_requirement() -> None:
    for options, sentence in (
        ("janitor.archive.enabled=true", "An archive needs a persistent volume."),
        ("ingress.enabled=true", "An Ingress needs a server and host names"),
        (f"{SERVER},ingress.enabled=true", "An Ingress needs a server and host names"),
        ("podMonitor.enabled=true,serviceMonitor.enabled=true", "would scrape everything twice"),
        ("server.enabled=true", "it needs authentication"),
    ):
        assert sentence in template("--set", options).stderr


@pytest.mark.parametrize("memory", ["524288Ki", "1.5Gi", "1e9", "128974848000m", "1000k", ".5Gi", "100000000"])
def test_memory_quantity_of_kubernetes_is_accepted(memory: str) -> None:
    assert template("--set-string", f"resources.limits.memory={memory}").returncode == 0


@pytest.mark.parametrize("memory", ["512ki", "512mi", "1KB", "1 Gi", "Gi", "1.2.3Gi", "-1Gi", "1mi"])
def test_invalid_memory_quantity_is_rejected(memory: str) -> None:
    made = template("--set-string", f"resources.limits.memory={memory}")
    assert made.returncode == 1
    assert "resources/limits/memory" in made.stderr


def memory_limits(*options: str) -> dict[str, str | None]:
    """Return the memory limits of the pods of janitor and server by container name."""
    found = {}
    for pod in pods(objects(*options)):
        [container] = pod["spec"]["containers"]
        if container["name"] in ("janitor", "server"):
            found[container["name"]] = container["resources"].get("limits", {}).get("memory")
    return found


def test_memory_limit_of_a_server_pod_follows_its_settings() -> None:
    assert memory_limits() == {"janitor": "512Mi"}
    alone = ("--values", str(CHART / "ci/server-values.yaml"))
    assert memory_limits(*alone) == {"janitor": "512Mi", "server": "512Mi"}
    larger = (*alone, "--set", "server.memory=1000,server.cache_mb=0")
    assert memory_limits(*larger) == {"janitor": "512Mi", "server": "1226Mi"}
    embedded = ("--values", str(CHART / "ci/embedded-values.yaml"))
    assert memory_limits(*embedded) == {"janitor": "640Mi"}
    assert memory_limits(*embedded, "--set", "server.memory=1000") == {"janitor": "1384Mi"}
    # A limit in the values has priority.
    assert memory_limits(*larger, "--set", "resources.limits.memory=2Gi") == {"janitor": "2Gi", "server": "2Gi"}
    own = "components.server.resources.limits.memory=3Gi"
    assert memory_limits(*larger, "--set", own) == {"janitor": "512Mi", "server": "3Gi"}
    assert memory_limits(*larger, "--set", "resources.limits=null") == {"janitor": None, "server": None}
    assert memory_limits(*larger, "--set", "resources.limits.cpu=2")["server"] == "1226Mi"


def sections(values: dict[str, Any], path: str = "") -> list[str]:
    """Return the paths of values that contain other values."""
    inner = [(f"{path}{name}", value) for name, value in values.items() if isinstance(value, dict) and value]
    return [found for name, value in inner for found in (name, *sections(value, f"{name}."))]


SECTIONS = sections(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))


@pytest.mark.parametrize("removed", [*SECTIONS, "mode", "janitor.http.host", "janitor.state", "serverReplicas"])
def test_removed_value_is_named_in_the_error_or_optional(removed: str) -> None:
    made = template("--set", f"mode=cronjob,{MANAGER},serviceMonitor.enabled=true", "--set", f"{removed}=null")
    if made.returncode == 0:
        assert conforms(made.stdout)[0] == 0
    else:
        assert f"missing property '{removed.rpartition('.')[2]}'" in made.stderr


def test_large_number_is_rendered_without_an_exponent(tmp_path: Path) -> None:
    documents = objects("--set", "janitor.rate_rows_per_second=123456789,storage.hbase.timeout_seconds=1000000")
    assert settings_of(documents, tmp_path).janitor.rate_rows_per_second == 123_456_789


def test_changed_setting_starts_a_new_pod_and_a_label_does_not() -> None:
    def checksum(*words: str) -> str:
        [pod] = pods([d for d in objects(*words) if d["kind"] == "Deployment"])
        return str(pod["metadata"]["annotations"]["checksum/config"])

    assert checksum() != checksum("--set", "janitor.every_seconds=61")
    assert checksum() == checksum("--set", "podLabels.a=b")


def test_every_pod_of_every_example_has_least_privileges(example: Path) -> None:
    documents = objects("--values", example)
    assert pods(documents)
    for pod in pods(documents):
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
            assert {"/tmp", "/etc/tms", "/var/lib/tms"} <= {mount["mountPath"] for mount in container["volumeMounts"]}  # noqa: S108


def executor(*words: object) -> dict[str, Any]:
    [config] = [d for d in objects(*words) if d["kind"] == "ConfigMap" and "executor.yaml" in d["data"]]
    found: dict[str, Any] = yaml.safe_load(config["data"]["executor.yaml"])
    return found


def test_spark_executors_have_least_privileges_and_mount_the_archive() -> None:
    made = executor("--set", f"{ARCHIVED},spark.master=k8s://https://a")
    driver = next(pod for pod in pods(objects("--set", ARCHIVED)) if pod["spec"]["containers"][0]["name"] == "spark")
    assert conforms(json.dumps(made))[0] == 0
    [container], [of_driver] = made["spec"]["containers"], driver["spec"]["containers"]
    assert container["securityContext"] == of_driver["securityContext"]
    assert container["volumeMounts"] == of_driver["volumeMounts"]
    assert made["spec"]["volumes"] == driver["spec"]["volumes"]
    assert made["spec"]["securityContext"] == driver["spec"]["securityContext"]
    assert made["spec"]["automountServiceAccountToken"] is False
    # Spark adds the resources and the command.
    assert "resources" not in container
    assert container["args"] == []
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": "x-tms-janitor"}}
    assert claim in made["spec"]["volumes"]


def test_upgrade_without_values_only_plans(tmp_path: Path) -> None:
    assert settings_of(objects("--is-upgrade"), tmp_path).janitor.apply is False


def test_long_names_are_truncated_to_the_limit_of_kubernetes(example: Path) -> None:
    for document in objects("--values", example, "--set", f"fullnameOverride={'n' * 80}"):
        limit = 52 if document["kind"] == "CronJob" else 63
        assert len(document["metadata"]["name"]) <= limit
        assert not document["metadata"]["name"].endswith("-")


def test_chart_has_no_dependencies_and_only_its_own_image() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert "dependencies" not in chart
    images = {c["image"] for pod in pods(objects()) for c in pod["spec"]["containers"]}
    assert images == {f"tms-janitor:{chart['appVersion']}"}
