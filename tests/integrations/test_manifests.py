"""The manifests for Kubernetes: their names and ports fit together, and Kubernetes' own schemas know every field."""

from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

EXAMPLES = Path(__file__).parents[2] / "examples"
MANIFESTS = sorted(path.name for path in EXAMPLES.glob("kubernetes_*.yaml"))
#: Oldest and newest versions of Kubernetes whose schemas are tried.
VERSIONS = ("1.27", "1.33")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_schemas_of_kubernetes_know_every_field(name: str, version: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for document in documents(name):
        schemas.validate(document, version, strict=True)


def test_islands_find_their_store() -> None:
    service, store, job = documents("kubernetes_islands.yaml")
    (container,), (island,) = store["spec"]["containers"], job["spec"]["template"]["spec"]["containers"]
    (port,) = service["spec"]["ports"]
    variables = {entry["name"]: entry["value"] for entry in island["env"]}
    assert service["spec"]["selector"] == store["metadata"]["labels"]
    assert variables["BAGUA_ISLANDS"] == f"tcp://{service['metadata']['name']}:{port['port']}"
    assert [entry["name"] for entry in container["env"]] == ["POD_IP"]
    assert container["command"] == ["baguarun", "--serve-islands", f"$(POD_IP):{port['targetPort']}"]
