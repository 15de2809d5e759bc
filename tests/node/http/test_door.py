"""The port before, while and after a model is behind it; who may come in; bounds."""

from __future__ import annotations

import json
import socket
import subprocess

import harness
import pytest
from harness import ask, code

from node.http.access import Access
from node.http.routes import ENDPOINTS


@pytest.fixture(scope="module")
def running_node(tmp_path_factory):
    with harness.served(tmp_path_factory.mktemp("door") / "data") as node:
        yield node


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_port_says_loading_then_ok_then_stops(tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with harness.start(tmp_path / "data", port=port) as process:

        def status():
            try:
                return ask(f"{url}/health")
            except OSError:
                return None

        first = harness.until(status, harness.START_S)
        assert (first[0], code(first)) == (503, "loading")
        models = ask(f"{url}/v1/models")
        assert (models[0], code(models)) == (503, "loading")
        assert models[1]["Retry-After"] == "1"
        harness.until(lambda: status()[0] == 200, harness.START_S)
        process.terminate()
        assert process.wait(harness.STOP_S) == 0
        assert status() is None


def test_models_and_health_answer_curl(running_node):
    def curl(path, *arguments):
        return subprocess.run(
            ["curl", "-s", "-m", "10", *arguments, running_node.base_url + path],
            capture_output=True,
            check=True,
        ).stdout

    assert json.loads(curl("/health")) == {"status": "ok"}
    (model,) = json.loads(curl("/v1/models"))["data"]
    assert model["id"] == "muse-novels-6m" and model["object"] == "model"
    assert json.loads(curl("/v1/models/muse-novels-6m")) == model
    assert json.loads(curl("/v1/models/other"))["error"]["code"] == "model_not_found"
    assert curl("/health", "-I").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["//v1/models", "/V1/models", "/v1/models/", "/v1", "/..%2fv1"])
def test_other_spellings_of_a_route_are_no_routes(running_node, path):
    status, _, body = ask(running_node.base_url + path)
    assert status == 404 and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_other_methods_are_refused(running_node):
    for method in ("POST", "DELETE", "OPTIONS", "PUT"):
        answer = ask(running_node.base_url + "/v1/models", method)
        assert (answer[0], code(answer)) == (405, "method_not_allowed")


def test_a_page_of_another_origin_or_another_name_for_us_is_refused(running_node):
    url = running_node.base_url + "/v1/models"
    assert code(ask(url, Origin="https://evil.example")) == "origin_refused"
    assert code(ask(url, Host="evil.example")) == "host_refused"
    assert ask(url, Origin=running_node.base_url)[0] == 200


def test_every_route_says_who_may_call_it_and_only_liveness_is_public():
    public = {endpoint.path for endpoint in ENDPOINTS if endpoint.access is Access.PUBLIC}
    assert public == {"/health", "/v1/health"}
    assert all(isinstance(endpoint.access, Access) for endpoint in ENDPOINTS)
