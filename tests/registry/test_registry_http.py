"""Confluent's REST interface, path by path and error by error, over the node's own HTTP server."""

from __future__ import annotations

import json
import socket
from http.client import HTTPResponse

import pytest

from support.registry.world import STRING, Rest, record
from support.waiting import DEADLINE_S, eventually
from tidemill.base.config.sections import RegistrySection
from tidemill.base.errors import UnavailableError, UnknownOutcomeError
from tidemill.registry.http import messages

A = record("a:int")
A_B = record("a:int", "b:int=0")
BAD = record("a:string")


def test_a_schema_is_registered_found_by_id_by_version_and_by_itself(rest: Rest) -> None:
    schema_id = rest.register("s", A)
    assert rest.ask("GET", f"/schemas/ids/{schema_id}") == (200, {"schema": A})
    assert rest.ask("GET", f"/schemas/ids/{schema_id}/schema") == (200, A)
    assert rest.ask("GET", f"/schemas/ids/{schema_id}/subjects") == (200, ["s"])
    assert rest.ask("GET", f"/schemas/ids/{schema_id}/versions") == (200, [{"subject": "s", "version": 1}])
    whole = {"subject": "s", "version": 1, "id": schema_id, "schema": A}
    assert rest.ask("GET", "/subjects/s/versions/1") == (200, whole)
    assert rest.ask("GET", "/subjects/s/versions/latest") == (200, whole)
    assert rest.ask("GET", "/subjects/s/versions/-1") == (200, whole)
    assert rest.ask("GET", "/subjects/s/versions/1/schema") == (200, A)
    assert rest.ask("POST", "/subjects/s", {"schema": A}) == (200, whole)
    assert rest.ask("GET", "/subjects") == (200, ["s"])
    assert rest.ask("GET", "/subjects/s/versions") == (200, [1])
    assert rest.ask("GET", "/schemas") == (200, [whole])
    assert rest.ask("GET", "/schemas/types") == (200, ["JSON", "PROTOBUF", "AVRO"])
    assert rest.ask("GET", "/contexts") == (200, ["."])
    assert rest.ask("GET", f"/schemas/ids/{schema_id}?fetchMaxId=true")[1]["maxId"] == schema_id


def test_white_space_makes_no_other_schema_and_one_schema_has_one_id_in_every_subject(rest: Rest) -> None:
    first = rest.register("s", A)
    assert rest.register("s", json.dumps(json.loads(A), indent=4)) == first
    assert rest.register("t", A) == first
    assert rest.ask("GET", "/subjects/s/versions") == (200, [1])
    assert rest.ask("GET", f"/schemas/ids/{first}/subjects") == (200, ["s", "t"])
    assert rest.register("t", A_B) == first + 1
    both = '{"type":"string"}'
    assert rest.register("u", both, "JSON") != rest.register("v", both), "of another type it is another schema"


@pytest.mark.parametrize("subject", ["a/b", "ä ö", "x%y", "a?b#c", "..", "a+b", "versions", "🦉-value", "'"])
def test_a_subject_may_have_any_name(rest: Rest, subject: str) -> None:
    from urllib.parse import quote

    path = quote(subject, safe="")
    schema_id = rest.register(subject, A)
    assert rest.ask("GET", "/subjects") == (200, [subject])
    assert rest.ask("GET", f"/subjects/{path}/versions/1")[1]["id"] == schema_id
    assert rest.ask("PUT", f"/config/{path}", {"compatibility": "NONE"})[0] == 200
    assert rest.ask("DELETE", f"/subjects/{path}") == (200, [1])
    assert rest.ask("DELETE", f"/subjects/{path}?permanent=true") == (200, [1])
    assert rest.ask("GET", "/subjects?deleted=true") == (200, [])


def test_a_body_that_does_not_come_is_not_waited_for(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "BODY_TIMEOUT_S", 0.1)
    head = "POST /subjects/s/versions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", rest.port), timeout=DEADLINE_S) as client:
        client.sendall(f"{head}content-length: 1000\r\n\r\n{{".encode())
        found = HTTPResponse(client)
        found.begin()
        assert (found.status, json.loads(found.read())["error_code"]) == (408, 408)
    eventually(lambda: not rest._server.bounded.under_way)
    assert rest.register("s", A) == 1


def test_errors_of_what_is_not_there(rest: Rest) -> None:
    rest.register("s", A)
    assert rest.error("GET", "/subjects/none/versions") == 40401
    assert rest.error("GET", "/subjects/none/versions/1") == 40401
    assert rest.error("GET", "/subjects/none/versions/latest") == 40401
    assert rest.error("POST", "/subjects/none", {"schema": A}) == 40401
    assert rest.error("DELETE", "/subjects/none") == 40401
    assert rest.error("DELETE", "/subjects/none/versions/1") == 40401
    assert rest.error("DELETE", "/config/none") == 40401
    assert rest.error("DELETE", "/mode/none") == 40401
    assert rest.error("POST", "/compatibility/subjects/none/versions/1", {"schema": A}) == 40401
    assert rest.error("GET", "/subjects/s/versions/2") == 40402
    assert rest.error("DELETE", "/subjects/s/versions/2") == 40402
    assert rest.error("POST", "/compatibility/subjects/s/versions/7", {"schema": A}) == 40402
    assert rest.error("POST", "/subjects/s", {"schema": A_B}) == 40403
    assert rest.error("GET", "/schemas/ids/99") == 40403
    assert rest.error("GET", "/schemas/ids/99/subjects") == 40403
    assert rest.error("GET", "/schemas/ids/2147483648") == 40403
    assert rest.error("GET", "/config/s") == 40408
    assert rest.error("GET", "/mode/s") == 40409
    assert rest.error("GET", "/schemas/ids/abc") == 404
    assert rest.error("GET", "/subjects/s/nothing") == 404
    assert rest.error("PUT", "/subjects/s") == 405


def test_a_deletion_hides_and_a_permanent_one_forgets(rest: Rest) -> None:
    first = rest.register("s", A)
    second = rest.register("s", A_B)
    assert rest.error("DELETE", "/subjects/s/versions/1?permanent=true") == 40407
    assert rest.error("DELETE", "/subjects/s?permanent=true") == 40405
    assert rest.ask("DELETE", "/subjects/s/versions/latest") == (200, 2)
    assert rest.error("DELETE", "/subjects/s/versions/2") == 40406
    assert rest.ask("GET", "/subjects/s/versions") == (200, [1])
    assert rest.ask("GET", "/subjects/s/versions?deleted=true") == (200, [1, 2])
    assert rest.ask("GET", "/subjects/s/versions?deletedOnly=true") == (200, [2])
    assert rest.error("GET", "/subjects/s/versions/2") == 40402
    assert rest.ask("GET", "/subjects/s/versions/2?deleted=true")[1]["deleted"] is True
    assert rest.ask("GET", f"/schemas/ids/{second}")[0] == 200, "records of it may still be read"
    assert rest.ask("GET", f"/schemas/ids/{second}/subjects") == (200, [])
    assert rest.ask("GET", f"/schemas/ids/{second}/subjects?deleted=true") == (200, ["s"])
    assert rest.ask("DELETE", "/subjects/s/versions/2?permanent=true") == (200, 2)
    assert rest.error("GET", f"/schemas/ids/{second}") == 40403
    assert rest.ask("DELETE", "/subjects/s") == (200, [1])
    assert rest.error("DELETE", "/subjects/s") == 40404
    assert rest.error("GET", "/subjects/s/versions") == 40401
    assert rest.ask("GET", "/subjects") == (200, [])
    assert rest.ask("GET", "/subjects?deletedOnly=true") == (200, ["s"])
    assert rest.register("s", A) == first, "what was hidden only keeps its id"
    assert rest.ask("GET", "/subjects/s/versions") == (200, [2]), "and gets a version of its own"
    assert rest.ask("DELETE", "/subjects/s") == (200, [2])
    assert rest.ask("DELETE", "/subjects/s?permanent=true") == (200, [1, 2])
    assert rest.error("GET", f"/schemas/ids/{first}") == 40403
    assert rest.register("s", A) == second + 1, "an id is never given twice"


@pytest.mark.processes
def test_errors_of_bad_input_change_nothing(rest: Rest) -> None:
    for schema, kind in (
        ("{", "AVRO"),
        ("", "AVRO"),
        ("{}", "AVRO"),
        ('{"type":"nothing"}', "JSON"),
        ("[]", "JSON"),
        ("message {", "PROTOBUF"),
        (A, "XML"),
        (STRING, "avro "),
    ):
        assert rest.error("POST", "/subjects/s/versions", {"schema": schema, "schemaType": kind}) == 42201
    assert rest.error("POST", "/subjects/s/versions", {}) == 42201
    assert rest.error("POST", "/subjects/s/versions", b"{") == 400
    assert rest.error("POST", "/subjects/s/versions", b"[]") == 422
    assert rest.error("POST", "/subjects/s/versions", {"schema": A, "schemaType": 3}) == 422
    assert rest.error("POST", "/subjects/s/versions", {"schema": A, "id": "x"}) == 422
    assert rest.error("POST", "/subjects/s/versions", {"schema": A, "references": [1]}) == 422
    assert rest.error("POST", "/subjects/s/versions", {"schema": A, "metadata": {"tags": {}}}) == 42210
    assert rest.error("POST", "/subjects/s/versions", {"schema": STRING + " " * 200_000}) == 42209
    assert rest.error("POST", "/subjects/s/versions", {"schema": A, "id": 7}) == 42205
    assert rest.ask("POST", "/subjects/s/versions", json.dumps({"schema": A}).encode(), "text/plain")[0] == 415
    assert rest.ask("POST", "/subjects/s/versions", json.dumps({"schema": A}).encode(), "")[0] == 415
    for version in ("0", "x", "-2", "2147483648", "1.0", "٣"):
        from urllib.parse import quote

        assert rest.error("GET", f"/subjects/s/versions/{quote(version)}") == 42202
    assert rest.error("PUT", "/config", {"compatibility": "SIDEWAYS"}) == 42203
    assert rest.error("PUT", "/config/s", {}) == 42203
    assert rest.error("PUT", "/config/s", {"compatibility": "FULL", "compatibilityGroup": "g"}) == 42205
    assert rest.error("PUT", "/mode/s", {"mode": "SLEEPING"}) == 42204
    for subject in ("%20", ":ctx:s", "%00", "__GLOBAL", "x" * 600):
        assert rest.error("POST", f"/subjects/{subject}/versions", {"schema": A}) == 42208
    assert rest.ask("GET", "/subjects?deleted=true") == (200, [])
    assert rest.ask("GET", "/config") == (200, {"compatibilityLevel": "BACKWARD"})


def test_an_incompatible_schema_is_409_and_a_check_tells_why(rest: Rest) -> None:
    rest.register("s", A)
    status, found = rest.ask("POST", "/subjects/s/versions", {"schema": BAD})
    assert (status, found["error_code"]) == (409, 409)
    assert "TYPE_MISMATCH" in found["message"]
    path = "/compatibility/subjects/s/versions"
    assert rest.ask("POST", f"{path}/latest", {"schema": BAD}) == (200, {"is_compatible": False})
    status, found = rest.ask("POST", f"{path}/1?verbose=true", {"schema": BAD})
    assert found["is_compatible"] is False and "TYPE_MISMATCH" in found["messages"][0]
    assert rest.ask("POST", f"{path}?verbose=true", {"schema": A_B}) == (
        200,
        {"is_compatible": True, "messages": []},
    )
    assert rest.ask("POST", "/compatibility/subjects/new/versions/latest", {"schema": A}) == (
        200,
        {"is_compatible": True},
    )
    assert rest.error("POST", f"{path}/latest", {"schema": "{"}) == 42201
    rest.ask("PUT", "/config/s", {"compatibility": "NONE"})
    rest.register("s", BAD)


def test_levels_are_configured_for_all_and_for_one_subject(rest: Rest) -> None:
    rest.register("s", A)
    assert rest.ask("PUT", "/config", {"compatibility": "full"}) == (200, {"compatibility": "FULL"})
    assert rest.ask("GET", "/config") == (200, {"compatibilityLevel": "FULL"})
    assert rest.ask("GET", "/config/s?defaultToGlobal=true") == (200, {"compatibilityLevel": "FULL"})
    assert rest.ask("PUT", "/config/s", {"compatibility": "FORWARD"})[0] == 200
    assert rest.ask("GET", "/config/s") == (200, {"compatibilityLevel": "FORWARD"})
    assert rest.ask("POST", "/subjects/s/versions", {"schema": record("a:int", "b:int")})[0] == 200
    assert rest.ask("DELETE", "/config/s") == (200, {"compatibilityLevel": "FORWARD"})
    assert rest.error("GET", "/config/s") == 40408
    assert rest.ask("DELETE", "/config") == (200, {"compatibilityLevel": "FULL"})
    assert rest.ask("GET", "/config") == (200, {"compatibilityLevel": "BACKWARD"})
    rest.ask("PUT", "/config/s", {"compatibility": "NONE"})
    rest.ask("DELETE", "/subjects/s")
    assert rest.error("GET", "/config/s") == 40408, "it goes with the subject's last live version"


def test_modes_hold_writers_off_and_let_an_import_bring_its_ids(rest: Rest) -> None:
    rest.register("s", A)
    assert rest.ask("PUT", "/mode/s", {"mode": "READONLY"}) == (200, {"mode": "READONLY"})
    assert rest.error("POST", "/subjects/s/versions", {"schema": A_B}) == 42205
    assert rest.error("DELETE", "/subjects/s") == 42205
    assert rest.ask("POST", "/subjects/s/versions", {"schema": A})[0] == 200, "what is there may be asked for"
    assert rest.ask("DELETE", "/mode/s") == (200, {"mode": "READONLY"})
    assert rest.error("PUT", "/mode", {"mode": "IMPORT"}) == 42205
    assert rest.ask("PUT", "/mode?force=true", {"mode": "IMPORT"})[0] == 200
    assert rest.error("POST", "/subjects/i/versions", {"schema": A_B}) == 42205
    body = {"schema": A_B, "id": 500, "version": 7}
    assert rest.ask("POST", "/subjects/i/versions", body) == (200, {"id": 500, "version": 7})
    assert rest.ask("POST", "/subjects/i/versions", body) == (200, {"id": 500, "version": 7})
    assert rest.error("POST", "/subjects/i/versions", {"schema": BAD, "id": 500}) == 42207
    assert rest.error("POST", "/subjects/i/versions", {"schema": BAD, "id": 501, "version": 7}) == 42207
    assert rest.ask("PUT", "/mode", {"mode": "READWRITE"})[0] == 200
    assert rest.ask("GET", "/mode") == (200, {"mode": "READWRITE"})
    assert rest.register("j", record("z:int")) == 501, "own ids go on above the imported ones"


def test_an_import_may_bring_a_schema_under_a_second_id(rest: Rest) -> None:
    """A foreign registry may have stored the two texts as different schemas."""
    first = rest.register("s", A)
    assert rest.ask("PUT", "/mode?force=true", {"mode": "IMPORT"})[0] == 200
    assert rest.ask("POST", "/subjects/i/versions", {"schema": A, "id": 70}) == (200, {"id": 70, "version": 1})
    assert rest.ask("DELETE", "/mode") == (200, {"mode": "IMPORT"})
    assert rest.ask("POST", "/subjects/i", {"schema": A})[1]["id"] == 70
    assert rest.register("i", A) == 70, "it is there already"
    assert rest.register("t", A) == first, "the elder id is given out"
    for subject in ("s", "t"):
        assert rest.ask("DELETE", f"/subjects/{subject}")[0] == 200
        assert rest.ask("DELETE", f"/subjects/{subject}?permanent=true")[0] == 200
    assert rest.error("GET", f"/schemas/ids/{first}") == 40403
    assert rest.register("t", A) == 70


def test_what_is_referred_to_stays(rest: Rest) -> None:
    inner = record("x:int", name="n.Inner")
    rest.register("inner", inner)
    reference = {"name": "n.Inner", "subject": "inner", "version": 1}
    outer_id = rest.register("outer", record("i:n.Inner", name="n.Outer"), references=[reference])
    assert rest.ask("GET", f"/schemas/ids/{outer_id}")[1]["references"] == [reference]
    assert rest.ask("GET", "/subjects/inner/versions/1/referencedby") == (200, [outer_id])
    assert rest.error("DELETE", "/subjects/inner") == 42206
    assert rest.error("DELETE", "/subjects/inner/versions/1") == 42206
    missing = {**reference, "version": 2}
    body = {"schema": record("i:n.Inner", name="n.Third"), "references": [missing]}
    assert rest.error("POST", "/subjects/third/versions", body) == 42201
    assert rest.error("POST", "/subjects/third/versions", {"schema": body["schema"]}) == 42201
    rest.ask("DELETE", "/subjects/outer")
    assert rest.ask("DELETE", "/subjects/inner") == (200, [1])
    assert rest.error("DELETE", "/subjects/inner?permanent=true") == 42206, "the hidden one may come back"
    rest.ask("DELETE", "/subjects/outer?permanent=true")
    assert rest.ask("DELETE", "/subjects/inner?permanent=true") == (200, [1])


def test_a_store_that_fails_is_500_with_its_number(rest: Rest) -> None:
    rest.metastore.faults = [("before", UnavailableError("the store is away."))]
    assert rest.error("POST", "/subjects/s/versions", {"schema": A}) == 50001
    rest.metastore.faults = [("before", UnknownOutcomeError("nobody knows."))]
    assert rest.ask("POST", "/subjects/s/versions", {"schema": A})[0] == 200, "it is made again"


def test_normalized_schemas_differ_in_what_they_mean_only(rest: Rest) -> None:
    plain = '{"type":"record","name":"n.R","fields":[{"name":"a","type":"int","order":"ascending"}]}'
    other = '{"type":"record","namespace":"n","name":"R","fields":[{"name":"a","type":{"type":"int"}}]}'
    assert rest.register("s", plain) != rest.register("s", other)
    body = {"schema": plain}
    first = rest.ask("POST", "/subjects/t/versions?normalize=true", body)[1]
    assert rest.ask("POST", "/subjects/t/versions?normalize=true", {"schema": other})[1] == first
    assert rest.ask("PUT", "/config/u", {"normalize": True})[0] == 200
    assert rest.ask("POST", "/subjects/u/versions", {"schema": other})[1]["id"] == first["id"]


@pytest.mark.processes
def test_normalized_protobuf_schemas_have_their_fields_and_imports_in_order(rest: Rest) -> None:
    head = 'syntax = "proto3";\npackage p;\n'
    imports = ['import "google/protobuf/timestamp.proto";', 'import public "google/protobuf/duration.proto";']
    fields = [
        "string b = 2;",
        "google.protobuf.Timestamp at = 9;",
        "oneof o { int64 d = 7; google.protobuf.Duration e = 4; }",
    ]
    nested = [
        "message N { int32 y = 2; int32 x = 1; reserved 9, 4; }",
        "message N { reserved 4, 9; int32 x = 1; int32 y = 2; }",
    ]

    def text(imports: list[str], fields: list[str], nested: str) -> str:
        return head + "\n".join(imports) + "\nmessage M { " + nested + " ".join(["int32 a = 1;", *fields]) + " }"

    one = {"schemaType": "PROTOBUF", "schema": text(imports, fields, nested[0])}
    other = {"schemaType": "PROTOBUF", "schema": text(imports[::-1], fields[::-1], nested[1])}
    assert (
        rest.ask("POST", "/subjects/plain/versions", one)[1] != rest.ask("POST", "/subjects/plain/versions", other)[1]
    )
    first = rest.ask("POST", "/subjects/normal/versions?normalize=true", one)
    assert first[0] == 200
    assert rest.ask("POST", "/subjects/normal/versions?normalize=true", other) == first
    stored = rest.ask("GET", "/subjects/normal/versions/1")[1]["schema"]
    assert stored.index("duration.proto") < stored.index("timestamp.proto")
    assert stored.index("int32 x = 1;") < stored.index("int32 y = 2;"), stored
    assert rest.ask("POST", "/subjects/normal?normalize=true", other)[1]["version"] == 1


def test_lists_are_filtered_and_paged(rest: Rest) -> None:
    for name in ("a-1", "a-2", "b-1"):
        rest.register(name, A)
    rest.register("a-1", A_B)
    assert rest.ask("GET", "/subjects?subjectPrefix=a-") == (200, ["a-1", "a-2"])
    assert rest.ask("GET", "/subjects?subjectPrefix=:*:a-&offset=1&limit=1") == (200, ["a-2"])
    assert rest.ask("GET", "/subjects?offset=9") == (200, [])
    assert rest.error("GET", "/subjects?limit=x") == 400
    found = rest.ask("GET", "/schemas?latestOnly=true&subjectPrefix=a-")[1]
    assert [(one["subject"], one["version"]) for one in found] == [("a-1", 2), ("a-2", 1)]


def test_the_registry_takes_so_many_and_says_so() -> None:
    rest = Rest(RegistrySection(subjects=2, versions_per_subject=2, schemas=3))
    try:
        rest.ask("PUT", "/config", {"compatibility": "NONE"})
        rest.register("s", record("a:int"))
        rest.register("s", record("b:int"))
        assert rest.error("POST", "/subjects/s/versions", {"schema": record("c:int")}) == 42205
        rest.register("t", record("c:int"))
        assert rest.error("POST", "/subjects/t/versions", {"schema": record("d:int")}) == 42205
        assert rest.error("POST", "/subjects/u/versions", {"schema": record("a:int")}) == 42205
        rest.register("t", record("a:int"))
        assert rest.ask("PUT", "/config/x", {"compatibility": "NONE"})[0] == 200
        assert rest.error("PUT", "/config/y", {"compatibility": "NONE"}) == 42205
        facts = rest.registry.facts()
        assert (facts["schemas"], facts["subjects"], facts["versions"]) == (3, 2, 4)
        assert facts["schemas_limit"] == 3
    finally:
        rest.close()
