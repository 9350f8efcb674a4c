"""packaging/: rules for the Dockerfile, compose.yaml, the objects of the chart and the systemd units, without a daemon;
and the image's installation, replayed in an empty directory."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import postgast
import pytest
import yaml

from support.docs.examples import blocks, section
from support.packaging.dockerfile import Stage, StepError, lineage, parse, replay
from tidemill import __version__
from tidemill.base.config.config import load
from tidemill.base.config.environment import read_env_file
from tidemill.cli.main import load_command
from tidemill.objects.buckets.s3 import parse_s3
from tidemill.spark.check import check_file

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
CHART = PACKAGING / "helm" / "tidemill"
RENDER = ROOT / "tests" / "clients" / "go" / "bin" / "chart"
INSTRUCTIONS = ("RUN", "COPY", "ENV", "WORKDIR", "USER", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD")
ARGUMENTS, STAGES = parse((PACKAGING / "Dockerfile").read_text())
COMPOSE = yaml.safe_load((PACKAGING / "compose.yaml").read_text())
Objects = dict[tuple[str, str], dict[str, Any]]


def parses(words: list[str]) -> None:
    """Fail unless `tidemill WORDS` is a valid command line."""
    command: Any = load_command(words[0])
    rest = words[1:]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(words[0], rest)


# the Dockerfile -----------------------------------------------------------------------------------------


def steps(name: str, word: str) -> list[str]:
    return [text for stage in lineage(STAGES, name) for each, text in stage.steps if each == word]


def test_bases_are_pinned_and_the_last_stages_are_the_images() -> None:
    names = {stage.name for stage in STAGES}
    for stage in STAGES:
        image = re.sub(r"\$\{(\w+)\}", lambda found: ARGUMENTS[found[1]], stage.base)
        assert image in names or re.fullmatch(r"python:\d+\.\d+-slim-\w+", image), image
    assert [stage.name for stage in STAGES[-2:]] == ["node", "all"]


@pytest.mark.parametrize("target", ["node", "all"])
def test_an_image_runs_as_a_numeric_user_and_has_nothing_of_the_build_but_its_environment(target: str) -> None:
    assert steps(target, "USER")[-1] == "10001:10001"
    assert json.loads(steps(target, "ENTRYPOINT")[-1]) == ["tidemill"]
    parses(json.loads(steps(target, "CMD")[-1]))
    assert steps(target, "COPY") == [f"--from=install-{target} /opt/tidemill /opt/tidemill"]
    extra = {"node": "node,duckdb,polars", "all": "all"}[target]
    assert f'"tidemill[{extra}] @ file://' in steps(f"install-{target}", "RUN")[-1]


def test_steps_of_the_build_are_pinned_cached_nowhere_and_checked_by_hashes() -> None:
    every = [step for stage in STAGES for step in stage.steps]
    assert {word for word, _ in every} <= {*INSTRUCTIONS}
    for text in [text for word, text in every if word == "RUN"]:
        assert "sudo" not in text and "curl" not in text and "| " not in text, text
        if "pip install" in text or text.startswith("uv "):
            assert "--no-cache" in text, text
        if "uv pip install" in text:
            assert "--constraint requirements.lock" in text and "file://" in text, text
            assert "--compile-bytecode" in text, "a process of another user cannot store it, and compiles at each start"
        elif "pip install" in text:
            assert re.search(r" uv==[\d.]+$", text), text


def test_the_context_has_what_the_build_copies_and_nothing_else() -> None:
    lines = (PACKAGING / "Dockerfile.dockerignore").read_text().split()
    assert lines[0] == "*"
    admitted = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {source for text in steps("build", "COPY") for source in text.split()[:-1]}
    assert admitted == copied and all((ROOT / name).exists() for name in copied)


@pytest.mark.extended
@pytest.mark.processes
def test_the_installation_of_the_image_replayed_in_an_empty_directory(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "python")], check=True, timeout=300)
    root, path = tmp_path / "image", f"{tmp_path}/python/bin:/usr/bin:/bin"
    replay(lineage(STAGES, "install-node"), ROOT, root, path)
    tidemill = root / "opt" / "tidemill" / "bin" / "tidemill"
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([tidemill, "--version"], env=clean, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"tidemill {__version__}\n", done.stderr

    # uv checks constraints by their hashes: the same step refuses a package whose hash in the lock is another.
    lock = root / "src" / "requirements.lock"
    wrong = rf"\1 --hash=sha256:{'0' * 64}"
    text, count = re.subn(r"(msgspec==\S+) \\\n(?:    --hash=\S+ \\\n)*    --hash=\S+", wrong, lock.read_text())
    assert count == 1
    lock.write_text(text)
    install = lineage(STAGES, "install-node")[-1].steps[-1][1]
    one = re.sub(r'"tidemill.*', "--reinstall --no-deps msgspec", install)
    with pytest.raises(StepError, match="Hash mismatch for `msgspec"):
        replay([Stage("", "", [("WORKDIR", "/src"), ("RUN", one)])], ROOT, root, path)


# compose.yaml -------------------------------------------------------------------------------------------


def test_every_service_is_pinned_and_finds_its_files_and_volumes() -> None:
    for name, service in COMPOSE["services"].items():
        if "image" in service:
            assert re.search(r":[^:]*\d[^:]*$", service["image"]), service["image"]
        else:
            build = service["build"]
            assert (PACKAGING / build["context"]).resolve() == ROOT
            assert ROOT / build["dockerfile"] == PACKAGING / "Dockerfile"
            assert build["target"] in {stage.name for stage in STAGES}
            parses(service["command"])
            assert service["cap_drop"] == ["ALL"]
            for other, condition in service["depends_on"].items():
                assert condition == {"condition": "service_healthy"} and "healthcheck" in COMPOSE["services"][other]
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"], (
                f"{name}: a file of the clone may be unreadable in the container: {source}"
            )
        for config in service.get("configs", []):
            assert config["source"] in COMPOSE["configs"] and Path(config["target"]).name == config["source"]
            assert config["mode"] == 0o444, "the default is 0440 in some versions"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "passwords are in the file"


def configs_of_compose(directory: Path) -> Path:
    """Write the files of compose.yaml as Docker Compose does, and return their directory."""
    for name, config in COMPOSE["configs"].items():
        pieces = config["content"].split("$$")
        assert not any("$" in piece for piece in pieces), "Docker Compose replaces a variable before tidemill does"
        (directory / name).write_text("$".join(pieces))
    return directory


def test_the_node_of_compose_has_a_valid_configuration_a_bucket_and_a_pipeline(tmp_path: Path) -> None:
    environment, files = COMPOSE["services"]["node"]["environment"], configs_of_compose(tmp_path)
    image = dict(text.split("=") for text in steps("node", "ENV")[-1].split())
    for name in ("node", "shop"):
        targets = [config["target"] for config in COMPOSE["services"][name]["configs"]]
        assert targets == [image["TIDEMILL_CONFIG"], "/etc/tidemill/pipeline.py"]
    config = load(files / "tidemill.toml", environ=environment)
    assert config.capture["shop"].dsn == environment["SHOP_DSN"]
    assert config.consensus.url.startswith("postgresql://") and config.node.advertised_host == "localhost"
    bucket, _, options = parse_s3(config.objects.url, environment)
    assert (bucket, options["endpoint"]) == ("tidemill", "http://objects:9000")
    assert f"mkdir -p /data/{bucket} " in COMPOSE["services"]["objects"]["entrypoint"][-1]
    assert COMPOSE["services"]["objects"]["environment"]["MINIO_ROOT_PASSWORD"] == options["secret_access_key"]
    assert list(config.pipeline) == ["shop"] and COMPOSE["services"]["shop"]["command"][-1] == "shop"
    assert Path(config.pipeline["shop"].file).name == "pipeline.py"
    checked = check_file(files / "pipeline.py", "shop")
    assert not checked.problems


def test_postgresql_of_compose_is_healthy_when_the_database_of_consensus_exists(tmp_path: Path) -> None:
    service, environment = COMPOSE["services"]["postgres"], COMPOSE["services"]["node"]["environment"]
    _, _, database = environment["TIDEMILL_CONSENSUS__URL"].rpartition("/")
    check = service["healthcheck"]["test"]
    assert check[:2] == ["CMD", "psql"], "pg_isready succeeds without the database"
    assert check[check.index("-d") + 1] == database and check[-2:] == ["-c", "select 1"]
    (script,) = service["configs"]
    assert Path(script["target"]).parent == Path("/docker-entrypoint-initdb.d")
    text = (configs_of_compose(tmp_path) / script["source"]).read_text()
    postgast.parse(text)
    assert f"CREATE DATABASE {database};" in text


# systemd ------------------------------------------------------------------------------------------------

UNITS = sorted((PACKAGING / "systemd").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_runs_a_valid_command_as_an_unprivileged_user(unit: Path) -> None:
    found = dict(line.split("=", 1) for line in unit.read_text().splitlines() if "=" in line and line[0] != "#")
    program, *words = found["ExecStart"].split()
    assert program == "/opt/tidemill/bin/tidemill"
    parses([word.replace("%i", "shop") for word in words])
    assert found["User"] == "tidemill" and found["NoNewPrivileges"] == "yes" and found["ProtectSystem"] == "strict"
    assert found["RestartPreventExitStatus"] == "2"
    assert f"TIDEMILL_NODE__DATA=/var/lib/{found['StateDirectory']}" in found["Environment"].split()


def test_the_steps_of_the_page_create_all_files_that_the_units_read(tmp_path: Path) -> None:
    """A unit without its configuration or without a variable of it ends with exit code 2, and is not restarted."""
    code = "".join(code for _, code in blocks(section(ROOT / "docs" / "guides" / "deployment.md", "systemd")))
    before, start, _ = code.partition("systemctl daemon-reload")
    assert start, code
    for line in before.splitlines():
        program, *words = line.split()
        sources = [word for word in words if word.startswith("packaging/")]
        if program in ("install", "cp") and sources:
            found = [path for source in sources for path in ROOT.glob(source)]
            assert len(found) >= len(sources), line
            target = tmp_path / words[-1].lstrip("/")
            target = target if words[-1].endswith("/") else target.parent
            target.mkdir(parents=True, exist_ok=True)
            for path in found:
                (target / (path.name if words[-1].endswith("/") else Path(words[-1]).name)).write_bytes(
                    path.read_bytes()
                )
    etc = tmp_path / "etc" / "tidemill"
    config = load(etc / "tidemill.toml", environ=read_env_file(etc / "tidemill.env"))
    assert config.consensus.url.startswith("postgresql://") and config.objects.url.startswith("s3://")
    assert not check_file(Path(config.pipeline["shop"].file), "shop").problems
    for unit in UNITS:
        assert (tmp_path / "etc" / "systemd" / "system" / unit.name).exists()
        environment = dict(re.findall(r"(TIDEMILL_CONFIG|EnvironmentFile)=-?(\S+)", unit.read_text()))
        assert all((tmp_path / path.lstrip("/")).exists() for path in environment.values()), environment
    for instance in re.findall(r"tidemill-pipeline@(\w+)", code):
        assert instance in config.pipeline


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    program = tmp_path / "tidemill"
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    paths = []
    for unit in UNITS:
        paths.append(tmp_path / unit.name.replace("@", "@shop"))
        paths[-1].write_text(unit.read_text().replace("/opt/tidemill/bin/tidemill", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", *map(str, paths)], capture_output=True, text=True, timeout=60)
    ours = [line for line in done.stderr.splitlines() if "tidemill" in line and "documentation" not in line.lower()]
    assert done.returncode == 0 and not ours, done.stderr


# the Helm chart -----------------------------------------------------------------------------------------

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SECRET = {"TIDEMILL_OBJECTS__URL": "gs://b?credentials=instance", "SHOP_DSN": "postgresql://h/shop"}
FULL: dict[str, Any] = {
    "secret": SECRET,
    "files": {"shop.py": "def build(p):\n    pass\n"},
    "pipelines": {"shop": None, "web_clicks": {"instances": 2, "resources": {"limits": {"memory": "4Gi"}}}},
    "podLabels": {"azure.workload.identity/use": "true"},
    "serviceMonitor": {**VALUES["serviceMonitor"], "enabled": True, "labels": {"release": "prometheus"}},
    "nodes": {**VALUES["nodes"], "storageClass": "fast", "nodeSelector": {"disk": "ssd"}},
    "serviceAccount": {"annotations": {"iam.gke.io/gcp-service-account": "x@y"}},
    "imagePullSecrets": [{"name": "pull"}],
    "volumes": [{"name": "tls", "secret": {"secretName": "shop-tls"}}],
    "volumeMounts": [{"name": "tls", "mountPath": "/tls", "readOnly": True}],
}


def render(values: dict[str, Any], release: str = "shop") -> subprocess.CompletedProcess[str]:
    if not RENDER.exists():
        pytest.skip("the renderer of Helm templates is not installed (tests/clients/install)")
    context = {"Values": VALUES | values, "Release": {"Name": release, "Namespace": "apps", "Revision": 1}}
    return subprocess.run(
        [str(RENDER), str(CHART)], input=json.dumps(context), capture_output=True, text=True, timeout=60
    )


def objects(values: dict[str, Any]) -> Objects:
    done = render(values)
    assert done.returncode == 0, done.stderr
    found = [each for each in yaml.safe_load_all(done.stdout) if each]
    out = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(out) == len(found), "two objects of one name"
    return out


@pytest.fixture(scope="module")
def full() -> Objects:
    return objects(FULL)


def pods(rendered: Objects) -> list[dict[str, Any]]:
    return [each["spec"]["template"] for each in rendered.values() if each["kind"] in ("StatefulSet", "Deployment")]


@pytest.mark.go
def test_the_chart_makes_nodes_a_deployment_per_pipeline_and_what_belongs_to_them(full: Objects) -> None:
    assert set(full) == {
        ("ConfigMap", "shop-tidemill"),
        ("Secret", "shop-tidemill"),
        ("ServiceAccount", "shop-tidemill"),
        ("StatefulSet", "shop-tidemill"),
        ("Service", "shop-tidemill"),
        ("Service", "shop-tidemill-nodes"),
        ("PodDisruptionBudget", "shop-tidemill"),
        ("ServiceMonitor", "shop-tidemill"),
        ("Deployment", "shop-tidemill-pipeline-shop"),
        ("Deployment", "shop-tidemill-pipeline-web-clicks"),
    }
    data = full["ConfigMap", "shop-tidemill"]["data"]
    assert data["tidemill.toml"] == VALUES["config"] and data["shop.py"] == FULL["files"]["shop.py"]
    assert full["Secret", "shop-tidemill"]["stringData"] == SECRET
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


@pytest.mark.go
def test_commands_of_pods_parse_and_their_volumes_and_accounts_exist(full: Objects) -> None:
    for template in pods(full):
        spec = template["spec"]
        [container] = spec["containers"]
        words = " ".join(container["args"])
        if words.startswith("exec tidemill"):
            words = words.removeprefix("exec tidemill").replace('"$(echo "$POD_NAME" | tr - _)"', "pod_0")
        parses(words.split())
        assert template["metadata"]["labels"]["azure.workload.identity/use"] == "true"
        volumes = {volume["name"] for volume in spec["volumes"]} | (
            {"data"} if words.startswith("up") else set()  # the claim of the StatefulSet
        )
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert ("ServiceAccount", spec["serviceAccountName"]) in full
        for source in container["envFrom"]:
            assert ("Secret", source["secretRef"]["name"]) in full
        assert spec["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
        assert spec["securityContext"]["runAsUser"] == int(steps("node", "USER")[-1].split(":")[0])


@pytest.mark.go
def test_selectors_select_the_nodes_and_probes_ask_what_a_node_serves(full: Objects) -> None:
    stateful = full["StatefulSet", "shop-tidemill"]["spec"]
    labels = stateful["template"]["metadata"]["labels"]
    service, budget = full["Service", "shop-tidemill"], full["PodDisruptionBudget", "shop-tidemill"]
    headless, monitor = full["Service", "shop-tidemill-nodes"], full["ServiceMonitor", "shop-tidemill"]
    for selector in (
        stateful["selector"]["matchLabels"],
        service["spec"]["selector"],
        headless["spec"]["selector"],
        budget["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items() and "app.kubernetes.io/component" in selector
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= headless["metadata"]["labels"].items()
    assert not wanted.items() <= service["metadata"]["labels"].items(), "each node is scraped once"
    assert stateful["serviceName"] == headless["metadata"]["name"] and headless["spec"]["clusterIP"] == "None"
    [container] = stateful["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [f"{ports['http']} {ports['kafka']}"] == steps("node", "EXPOSE")
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    assert monitor["spec"]["endpoints"][0]["path"] == "/metrics"
    pipelines = [each for (kind, _), each in full.items() if kind == "Deployment"]
    for deployment in pipelines:
        selector = deployment["spec"]["selector"]["matchLabels"]
        assert selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
        assert not selector.items() <= labels.items()


@pytest.mark.go
def test_the_scheme_of_probes_and_the_monitor_is_a_value() -> None:
    found = objects(FULL | {"nodes": VALUES["nodes"] | {"scheme": "HTTPS"}})
    [container] = found["StatefulSet", "shop-tidemill"]["spec"]["template"]["spec"]["containers"]
    schemes = {container[f"{name}Probe"]["httpGet"]["scheme"] for name in ("startup", "liveness", "readiness")}
    assert schemes == {"HTTPS"}
    assert found["ServiceMonitor", "shop-tidemill"]["spec"]["endpoints"][0]["scheme"] == "https"


@pytest.mark.go
def test_a_changed_configuration_restarts_pods() -> None:
    def sums(values: dict[str, Any]) -> list[str]:
        return [each["metadata"]["annotations"]["checksum/config"] for each in pods(objects(FULL | values))]

    before, config, secret = sums({}), sums({"config": "[node]\n"}), sums({"secret": {"SHOP_DSN": "other"}})
    assert all(len({*each}) == 3 for each in zip(before, config, secret, strict=True))


@pytest.mark.go
def test_stores_come_from_a_secret_of_the_chart_or_an_existing_one() -> None:
    refused = render({})
    assert refused.returncode == 1 and "Set secret or existingSecret" in refused.stderr
    found = objects({"existingSecret": "mine"})
    assert not [kind for kind, _ in found if kind in ("Secret", "ServiceMonitor", "Deployment")]
    [template] = pods(found)
    assert template["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "mine"}}]


@pytest.mark.go
@pytest.mark.parametrize("release", ["1shop", "a.b", "a" * 44])
def test_a_release_whose_objects_would_have_bad_names_is_refused(release: str) -> None:
    refused = render(FULL, release)
    assert refused.returncode == 1 and f"The release is named {release}" in refused.stderr
    rendered = render(FULL, "a" * 43)
    assert rendered.returncode == 0, rendered.stderr


def test_every_value_that_a_template_reads_is_in_values_yaml() -> None:
    for template in (CHART / "templates").iterdir():
        for path in re.findall(r"\.Values((?:\.\w+)+)", template.read_text()):
            found: Any = VALUES
            for part in path.strip(".").split("."):
                assert part in found, (template.name, path)
                found = found[part]
