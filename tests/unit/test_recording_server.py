"""What tests rely on in the recording W&B server: it notes what a run has lost, and refuses what the service would."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request

import pytest
from support.wandb_server import WandbServer


@pytest.fixture
def server():
    with WandbServer() as server:
        yield server


def post(server: WandbServer, path: str, body: object, **headers: str) -> int:
    """The status of a request as the client would send it."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    authorization = "Basic " + base64.b64encode(f"api:{server.key}".encode()).decode()
    request = urllib.request.Request(server.url + path, data, {"Authorization": authorization, **headers})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def stream(server: WandbServer, offset: int, *values: int, **more: object) -> int:
    """Send rows of a run "r" that has been created."""
    lines = [json.dumps({"x": value}) for value in values]
    files = {"wandb-history.jsonl": {"offset": offset, "content": lines}}
    return post(server, "/files/recorded/p/r/file_stream", {"files": files, **more})


def upsert(server: WandbServer, **variables: object) -> int:
    query = {"operationName": "UpsertBucket", "query": "mutation UpsertBucket { upsertBucket }"}
    return post(server, "/graphql", {**query, "variables": {"name": "r", "project": "p", **variables}})


def values(run) -> list[int]:
    return [row["x"] for row in run.rows]


def test_rows_after_completion_are_counted_until_the_run_is_opened_again(server):
    upsert(server, host="h")
    assert stream(server, 0, 1, complete=True, exitcode=0) == 200
    stream(server, 1, 2)
    upsert(server, config="{}")
    stream(server, 2, 3)
    run = server.run("r")
    assert (run.state, run.rows_after_completion) == ("finished", 2)
    upsert(server, host="h")
    stream(server, 3, 4)
    assert (run.state, run.rows_after_completion, values(run)) == ("running", 2, [1, 2, 3, 4])


def test_a_request_sent_twice_overwrites_nothing(server):
    upsert(server)
    stream(server, 0, 1, 2)
    stream(server, 0, 1, 2)
    assert (server.run("r").rows_overwritten, server.run("r").requests) == (0, 2)
    stream(server, 1, 3)
    assert (server.run("r").rows_overwritten, values(server.run("r"))) == (1, [1, 3])
