"""The recording W&B server is as strict as the service, and fails on command: shown with the real client."""

from __future__ import annotations

import base64
import gzip
import json
import socket
import urllib.error
import urllib.request

import pytest
from support.loopback import Fault
from support.pluto_server import PlutoServer
from support.wandb_server import WandbServer

pytest.importorskip("wandb", reason='wandb is not installed: pip install "flyteplugins-tracking[wandb]"')


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


def test_a_fault_of_one_endpoint_spares_the_other(server):
    with server.failing(Fault.status(500, only="filestream")) as fault:
        assert upsert(server) == 200
        assert stream(server, 0, 1) == 500
    assert stream(server, 0, 1) == 200
    assert fault.hits == 1


def test_a_refusing_server_is_not_there_and_comes_back(server):
    with server.failing(Fault.refuse()), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    assert upsert(server) == 200


def test_a_request_whose_client_gave_up_is_not_served(server):
    upsert(server)
    with server.failing(Fault.mute()) as fault, socket.create_connection(("127.0.0.1", server.port)) as client:
        body = b'{"query": "mutation UpsertBucket", "variables": {"name": "late"}}'
        client.sendall(b"POST /graphql HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        server.wait_for(lambda: fault.hits)
    assert [run.id for run in server.runs] == ["r"]


@pytest.mark.parametrize("kind", [WandbServer, PlutoServer])
@pytest.mark.parametrize("sent", [b"", b'{"runId": '])
def test_a_request_whose_client_died_while_it_sent_is_not_served(kind, sent):
    with kind() as server:  # which raises here what its handlers raise
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"POST /graphql HTTP/1.1\r\nContent-Length: 100\r\n\r\n" + sent)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""
        assert not server.runs


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


def test_a_late_name_does_not_take_back_that_a_run_is_preempted(server):
    upsert(server, host="h")
    stream(server, 0, 1, preempting=True)
    upsert(server, host="h", displayName="late", id="run:recorded/p/r", entity="recorded")
    stream(server, 1, complete=True, exitcode=143)
    assert (server.run("r").state, server.run("r").name) == ("preempted", "late")


def test_a_request_sent_twice_overwrites_nothing(server):
    upsert(server)
    stream(server, 0, 1, 2)
    stream(server, 0, 1, 2)
    assert (server.run("r").rows_overwritten, server.run("r").requests) == (0, 2)
    stream(server, 1, 3)
    assert (server.run("r").rows_overwritten, values(server.run("r"))) == (1, [1, 3])


def test_requests_that_the_service_would_reject_are_rejected(server):
    assert stream(server, 0, 1) == 404
    assert post(server, "/graphql", {"query": "query Nothing { nothing }"}) == 200
    assert server.unknown_operations == ["Nothing"]
    compressed = gzip.compress(b'{"query": "query Viewer { viewer { id } }"}')
    assert post(server, "/graphql", compressed, **{"Content-Encoding": "gzip"}) == 200
    assert post(server, "/graphql", {"query": "{}"}, Authorization="Basic bm8=") == 401


def test_waiting_ends_in_time(server):
    with pytest.raises(TimeoutError, match="not within"):
        server.wait_for(lambda: server.run("nobody"), timeout_s=0.1)


def test_a_request_that_this_server_cannot_read_fails_the_test():
    with pytest.raises(KeyError, match="name"), WandbServer() as server:
        assert post(server, "/graphql", {"query": "mutation UpsertBucket"}) == 400
