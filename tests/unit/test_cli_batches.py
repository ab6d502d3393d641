"""Protects the commands of batches before a served API: uploads in flat memory, words, a watch either way, whole results."""

import hashlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.unit.batch_stand import KEY, BatchStand, batch_document, in_turn, open_stand, openai_error
from typer.testing import CliRunner

from weir.cli.batch_watch import FAULTS_MAX, Lines, follow
from weir.cli.batch_words import Batch, Pace, batch_of
from weir.cli.http_api import CommandFailed, Connection, Refused
from weir.cli.main import command_line

MIB = 1024 * 1024
COMMAND_WAIT_S = 60
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "assistant", "messages": []}}
PEAK = """
import sys
from weir.cli.main import main
try:
    main()
finally:
    print("peak", next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")), file=sys.stderr)
"""


@pytest.fixture
def stand() -> Iterator[BatchStand]:
    with open_stand() as made:
        yield made


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "rivers.jsonl"
    path.write_text(json.dumps(LINE) + "\n")
    return path


@dataclass
class Result:
    status: int
    out: str
    err: str


def run(stand: BatchStand, *words: str) -> Result:
    """The command, in this process."""
    given = ["batch", *words]
    done = CliRunner().invoke(command_line(given), [*given, "--api", stand.url, "--api-key", KEY])
    assert isinstance(done.exception, SystemExit | None), done.exception
    return Result(done.exit_code, done.stdout, done.stderr)


def good(stand: BatchStand, *words: str) -> Result:
    done = run(stand, *words)
    assert done.status == 0, done
    return done


def start(stand: BatchStand, *words: str, code: str = "", stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """The command as a process of its own."""
    program = ("-c", code) if code else ("-m", "weir.cli.main")
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    command = [sys.executable, *program, "batch", *words, "--api", stand.url, "--api-key", KEY]
    environment |= {"PYTHONUTF8": "1", "TERM": "xterm", "COLUMNS": "120"}
    return subprocess.Popen(command, env=environment, stdout=stdout, stderr=subprocess.PIPE)


# ── submit ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_is_submitted_and_only_the_id_is_on_standard_output(stand: BatchStand, requests: Path) -> None:
    """Protects scripts: the form, the endpoint of the first line, the order, and where each is said."""
    stand.looks = [batch_document(status="validating", total=1)]
    done = good(stand, "submit", str(requests), "--window", "90m", "--metadata", "run=7", "--metadata", "for=a=b")
    assert done.out == "batch_1\n"
    assert "rivers.jsonl is file-1; 1 lines for /v1/chat/completions; expires 2023-11-15T22:13:20Z" in done.err
    assert b'name="purpose"\r\n\r\nbatch\r\n' in stand.form_start
    assert b'name="file"; filename="rivers.jsonl"' in stand.form_start
    assert json.dumps(LINE).encode() + b"\n\r\n--weir-" in stand.form_end and stand.form_end.endswith(b"--\r\n")
    order = {"endpoint": "/v1/chat/completions", "completion_window": "90m", "metadata": {"run": "7", "for": "a=b"}}
    assert stand.bodies == [order | {"input_file_id": "file-1"}]


def test_an_endpoint_that_is_given_wins_over_the_first_line(stand: BatchStand, tmp_path: Path) -> None:
    """Protects whoever names it, and tells whoever did not that the first line has none."""
    path = tmp_path / 'a "b".jsonl'
    path.write_text("{\n")
    refused = run(stand, "submit", str(path))
    assert refused.status == 1 and "no JSON object with a url" in refused.err and not stand.asked
    good(stand, "submit", str(path), "--endpoint", "/v1/embeddings")
    assert stand.bodies[0]["endpoint"] == "/v1/embeddings"
    assert b'filename="a %22b%22.jsonl"' in stand.form_start


def test_fifty_mebibytes_are_uploaded_in_flat_memory(stand: BatchStand, requests: Path, tmp_path: Path) -> None:
    """Protects the machine of whoever submits: a file is never held whole, and comes whole."""
    large = tmp_path / "large.jsonl"
    line = json.dumps(LINE | {"custom_id": "x" * MIB}).encode()[: MIB - 1] + b"\n"
    with large.open("wb") as file:
        for _ in range(50):
            file.write(line)
    peaks = []
    for path in (requests, large):
        process = start(stand, "submit", str(path), "--endpoint", "/v1/chat/completions", code=PEAK)
        out, err = process.communicate(timeout=COMMAND_WAIT_S)
        assert (process.returncode, out) == (0, b"batch_1\n"), err
        peaks.append(int(err.split(b"peak ")[1]))
    assert stand.form_size > 50 * MIB
    assert peaks[1] - peaks[0] < 8 * 1024, peaks
    head, tail = stand.form_start[: stand.form_start.index(b"jsonl\r\n\r\n") + 9], stand.form_end.rpartition(b"\r\n--weir-")
    whole = hashlib.sha256(head)
    for _ in range(50):
        whole.update(line)
    whole.update(tail[1] + tail[2])
    assert whole.hexdigest() == stand.form_digest


def test_an_upload_that_is_refused_while_it_is_sent_names_the_line(stand: BatchStand, tmp_path: Path) -> None:
    """Protects whoever wrote the file: the refusal is heard before the end of the upload, and is one plain sentence."""
    large = tmp_path / "large.jsonl"
    large.write_bytes((json.dumps(LINE).encode() + b"\n") * (20 * MIB // 100))
    members = {"field": "file", "line": 3, "accepted": "a JSON object"}
    stand.upload_refusal = (MIB, 400, openai_error("invalid_request", "Line 3 is\x1b[2J no JSON object.", **members))
    refused = run(stand, "submit", str(large))
    assert refused.status == 1 and refused.out == ""
    sentence = "Line 3 is [2J no JSON object. (invalid_request; field: file; line: 3; accepted: a JSON object)"
    assert refused.err == f"error: {sentence}\n"
    assert [path for _, path in stand.asked] == ["/v1/files"]


def test_a_batch_that_is_refused_leaves_no_file(stand: BatchStand, requests: Path) -> None:
    """Protects the tenant's room: what no batch uses is deleted; after a fault, which may have created it, it stays."""
    stand.batch_refusal = (400, openai_error("exceeds_limit_capacity", "The lines need more than a whole day's budget."))
    refused = run(stand, "submit", str(requests))
    assert refused.status == 1 and "exceeds_limit_capacity" in refused.err and refused.out == ""
    assert stand.asked[-1] == ("DELETE", "/v1/files/file-1")
    stand.batch_refusal = (503, openai_error("file_store_unavailable", "The store does not answer."))
    assert run(stand, "submit", str(requests)).status == 1
    assert stand.asked[-1] == ("POST", "/v1/batches")


def test_what_cannot_be_submitted_is_one_sentence(stand: BatchStand, requests: Path, tmp_path: Path) -> None:
    """Protects whoever mistypes: nothing is asked of the API."""
    os.mkfifo(tmp_path / "pipe")
    for words, said in (
        ((str(tmp_path / "absent"),), "No such file"),
        ((str(tmp_path),), "not a plain file"),
        ((str(tmp_path / "pipe"),), "not a plain file"),
        ((str(requests), "--metadata", "run"), "NAME=VALUE"),
    ):
        refused = run(stand, "submit", *words)
        assert refused.status == 1 and said in refused.err and refused.err.count("\n") == 1, refused
    assert not stand.asked


def test_a_submit_that_watches_ends_as_the_watch_does(stand: BatchStand, requests: Path) -> None:
    """Protects scripts that wait: the id alone on standard output, the watch beside it, its status."""
    stand.looks = [batch_document(total=2), batch_document(total=2, status="completed", completed=1, failed=1)]
    done = run(stand, "submit", str(requests), "--watch")
    assert (done.status, done.out) == (3, "batch_1\n") and "batch_1: completed, 2 of 2 lines done, 1 failed" in done.err


# ── status, list, cancel ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_status_says_why_a_batch_waits_and_until_when(stand: BatchStand) -> None:
    """Protects whoever wonders: state, lines, the reason and its end; as JSON, all of it."""
    paused = {"paused_reason": "budget_exhausted", "resumes_at": 1_700_006_400}
    stand.looks = [batch_document(completed=3, failed=1, **paused)]
    shown = good(stand, "status", "batch_1").out
    assert "state     in progress (paused)" in shown and "lines     4 of 10 lines done, 1 failed" in shown
    assert "waits     a budget is used up (budget_exhausted), goes on at 2023-11-15T00:00:00Z" in shown
    assert json.loads(good(stand, "status", "batch_1", "--json").out) == stand.looks[0]


def test_a_status_of_what_ended_has_its_files_its_rate_and_its_faults(stand: BatchStand) -> None:
    """Protects whoever comes later; of many faults the first are shown."""
    files = {"output_file_id": "file-2", "error_file_id": "file-3"}
    stand.looks = [batch_document(status="completed", completed=8, failed=2, completed_at=1_700_000_015, **files)]
    shown = good(stand, "status", "batch_1").out
    for row in ("rate      2.0 lines per second", "ended     2023-11-14T22:13:35Z", "output    file-2", "errors    file-3"):
        assert row in shown
    faults = [{"code": "invalid_request", "message": f"Bad\x1b[31m {number}.", "line": number} for number in range(1, 13)]
    stand.looks = [batch_document(status="failed", failed_at=1_700_000_015, errors={"object": "list", "data": faults})]
    shown = good(stand, "status", "batch_1").out
    assert "why       line 10: Bad [31m 10. (invalid_request)" in shown and "and 2 more" in shown and "line 11" not in shown


def test_a_list_is_a_table_of_as_many_pages_as_it_needs(stand: BatchStand) -> None:
    """Protects the paging and the limit."""
    stand.listed = [batch_document(id=f"batch_{number}", completed=number) for number in range(250)]
    lines = [line.split() for line in good(stand, "list", "--limit", "220").out.splitlines() if "batch_" in line]
    assert [line[0] for line in lines] == [f"batch_{number}" for number in range(220)]
    assert lines[7][1:6] == ["in", "progress", "7", "0", "10"]
    assert stand.asked[-1] == ("GET", "/v1/batches?limit=20&after=batch_199")
    assert len(json.loads(good(stand, "list", "--json").out)) == 20


def test_no_answer_reaches_a_terminal_with_control_characters(stand: BatchStand) -> None:
    """Protects terminals from what a server says, in words, in a table and in JSON, which is the same document still."""
    stand.looks = stand.listed = [batch_document(id="b\x1b[2J\x9b1\u202e", status="in\rprogress", endpoint="/v1\x07")]
    for words in (("status", "x"), ("list",), ("cancel", "x"), ("status", "x", "--json"), ("list", "--json")):
        shown = good(stand, *words).out
        assert all(each.isprintable() or each == "\n" for each in shown), shown
    assert json.loads(good(stand, "status", "x", "--json").out) == stand.looks[0]


def test_a_batch_is_cancelled(stand: BatchStand) -> None:
    """Protects giving up, and the path, whatever an id has in it."""
    stand.looks = [batch_document(status="cancelling", completed=3)]
    assert good(stand, "cancel", "batch/1").out == "batch_1: cancelling, 3 of 10 lines done, 0 failed\n"
    assert stand.asked == [("POST", "/v1/batches/batch%2F1/cancel")]


# ── watching ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def watching(stand: BatchStand, rest: Callable[[], None]) -> tuple[int, list[str]]:
    """Follow the stand's batch, a second of its own clock at a time; the status and the lines."""
    connection, written, seconds = Connection(stand.url, KEY), io.StringIO(), iter(range(1_000))

    def ask() -> Batch:
        return batch_of(connection.call("GET", "/v1/batches/batch_1"))

    status = follow(ask, Lines(written), rest, lambda: float(next(seconds)))
    return status, written.getvalue().splitlines()


def test_a_watch_is_a_line_per_change_and_ends_by_how_the_batch_did(stand: BatchStand) -> None:
    """Protects logs and scripts: the rate, what is left, a pause, nothing where nothing changed, and the status."""
    paused = {"paused_reason": "budget_exhausted", "resumes_at": 1_700_006_400}
    stand.looks = [
        batch_document(status="validating"),
        batch_document(completed=2),
        batch_document(completed=2),
        batch_document(completed=4, failed=2),
        batch_document(completed=4, failed=2, **paused),
        batch_document(completed=10, status="completed"),
    ]
    status, lines = watching(stand, lambda: None)
    assert status == 0
    assert lines == [
        "batch_1: validating, 0 of 10 lines done, 0 failed",
        "batch_1: in progress, 2 of 10 lines done, 0 failed, 2.0 lines per second, 4 s left",
        "batch_1: in progress, 6 of 10 lines done, 2 failed, 2.0 lines per second, 2 s left",
        "batch_1: in progress (paused), 6 of 10 lines done, 2 failed, waits: a budget is used up (budget_exhausted), "
        "goes on at 2023-11-15T00:00:00Z",
        "batch_1: completed, 10 of 10 lines done, 0 failed",
    ]


@pytest.mark.parametrize(
    ("ended", "status"),
    [("completed", 3), ("failed", 4), ("expired", 4), ("cancelled", 4)],
)
def test_each_end_has_its_status(stand: BatchStand, ended: str, status: int) -> None:
    """Protects scripts: failed lines, and batches that did not come to their end, an expired one among them."""
    stand.looks = [batch_document(status=ended, completed=8, failed=2)]
    done = run(stand, "watch", "batch_1")
    assert (done.status, done.out) == (status, f"batch_1: {ended}, 10 of 10 lines done, 2 failed\n")


def test_a_server_that_goes_away_is_asked_again(stand: BatchStand) -> None:
    """Protects a watch from a restart: said once, and it goes on where it was."""

    def come_back() -> None:
        stand.looks = [batch_document(completed=10, status="completed")]
        stand.open()

    status, lines = watching(stand, in_turn(stand.close, lambda: None, come_back))
    assert status == 0 and [line.partition(": ")[0] for line in lines] == ["batch_1", lines[1].partition(": ")[0], "batch_1"]
    assert lines[1].startswith("No usable answer from http://127.0.0.1") and lines[1].endswith("Asking again.")


def test_a_server_that_stays_away_ends_the_watch(stand: BatchStand) -> None:
    """Protects scripts from a watch without an end."""
    rested: list[None] = []

    def rest() -> None:
        rested.append(None)
        stand.close()

    with pytest.raises(CommandFailed, match="is the cell running"):
        watching(stand, rest)
    assert len(rested) == FAULTS_MAX + 1


def test_a_refusal_that_waiting_does_not_cure_ends_the_watch(stand: BatchStand) -> None:
    """Protects whoever watches with a key that was revoked meanwhile; a busy gateway is asked again."""
    answers: list[CommandFailed] = [Refused("busy", 429), Refused("no store", 503), Refused("revoked", 401)]

    def ask() -> Batch:
        if len(asked) < 1:
            asked.append(None)
            return batch_of(batch_document())
        raise answers.pop(0)

    asked: list[None] = []
    with pytest.raises(Refused, match="revoked"):
        follow(ask, Lines(io.StringIO()), lambda: None)
    assert answers == []


def test_the_rate_is_of_the_last_seconds_alone() -> None:
    """Protects the time that is shown as left: a fast start is soon forgotten, and looks that are far apart still count."""
    pace = Pace()
    assert pace.lines_per_s() is None
    pace.note(0, 0)
    for second in range(1, 41):
        pace.note(second, 1_000 + second)
    assert pace.lines_per_s() == pytest.approx(1.0)
    pace.note(140, 1_240)
    assert pace.lines_per_s() == pytest.approx(2.0)


def test_an_interrupt_leaves_the_batch_alone(stand: BatchStand) -> None:
    """Protects batches from whoever stops looking."""
    process = start(stand, "watch", "batch_1")
    assert process.stdout is not None and b"in progress" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=COMMAND_WAIT_S)
    assert (process.returncode, err) == (130, b"The batch goes on; `weir batch watch batch_1` looks again.\n")
    assert {method for method, _ in stand.asked} == {"GET"}


def test_a_watch_on_a_terminal_is_a_bar_that_is_drawn_anew(stand: BatchStand) -> None:
    """Protects the live view: in place, with the counts, the rate and the time left; its last frame stays."""
    stand.looks = [
        batch_document(completed=2),
        batch_document(completed=4, failed=1),
        batch_document(completed=9, failed=1, status="completed"),
    ]
    outer, inner = pty.openpty()
    process = start(stand, "watch", "batch_1", stdout=inner)
    os.close(inner)
    seen = b""
    try:
        while b"10 of 10 lines done, 1 failed" not in seen:
            seen += os.read(outer, 65_536)
        _, err = process.communicate(timeout=COMMAND_WAIT_S)
    finally:
        os.close(outer)
    assert (process.returncode, err) == (3, b"")
    assert "━".encode() in seen and b"lines per second" in seen and b" s left" in seen and b"\x1b[1A" in seen


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def ended(stand: BatchStand) -> BatchStand:
    stand.looks = [batch_document(status="completed", completed=8, failed=2, output_file_id="file-2", error_file_id="file-3")]
    stand.contents = {"file-2": b'{"a": "\xc3\xa9"}\n' * 100_000, "file-3": b'{"error": 1}\n'}
    return stand


def test_results_go_to_files_or_to_standard_output(ended: BatchStand, tmp_path: Path) -> None:
    """Protects the answers, byte by byte, and that nothing else is left or printed."""
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    done = good(ended, "results", "batch_1", "--output", str(output), "--errors", str(errors))
    assert (done.out, done.err) == ("", "")
    assert (output.read_bytes(), errors.read_bytes()) == (ended.contents["file-2"], ended.contents["file-3"])
    assert sorted(tmp_path.iterdir()) == [errors, output]
    assert good(ended, "results", "batch_1").out.encode() == ended.contents["file-2"]
    assert good(ended, "results", "batch_1", "--errors", "-").out.encode() == ended.contents["file-3"]


def test_results_overwrite_nothing_without_force(ended: BatchStand, tmp_path: Path) -> None:
    """Protects files that are there, also from results that are cut off."""
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    refused = run(ended, "results", "batch_1", "--output", str(output))
    assert refused.status == 1 and "--force" in refused.err and not ended.asked
    ended.is_cut = True
    cut = run(ended, "results", "batch_1", "--output", str(output), "--force")
    assert cut.status == 1 and "IncompleteRead" in cut.err and output.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [output]
    ended.is_cut = False
    good(ended, "results", "batch_1", "--output", str(output), "--force")
    assert output.read_bytes() == ended.contents["file-2"]
    twice = run(ended, "results", "batch_1", "--output", str(output), "--errors", str(output), "--force")
    assert twice.status == 1 and "two files" in twice.err
    for path in (tmp_path, tmp_path / "absent" / "out.jsonl"):
        assert run(ended, "results", "batch_1", "--output", str(path)).status == 1


def test_results_that_are_not_there_yet_or_never_are_told_apart(stand: BatchStand, tmp_path: Path) -> None:
    """Protects scripts: status 1 as long as they may come; an expired batch without failed lines is no error."""
    output = tmp_path / "out.jsonl"
    early = run(stand, "results", "batch_1", "--output", str(output))
    assert early.status == 1 and "There is nothing yet: in progress, 0 of 10 lines done" in early.err
    stand.looks = [batch_document(status="expired", error_file_id="file-3")]
    stand.contents = {"file-3": b'{"error": "batch_expired"}\n'}
    done = good(stand, "results", "batch_1", "--output", str(output), "--errors", str(tmp_path / "errors.jsonl"))
    assert "No line of it has an answer: expired" in done.err and not output.exists()
    assert (tmp_path / "errors.jsonl").read_bytes() == stand.contents["file-3"]


def test_results_on_a_terminal_are_fit_for_it(stand: BatchStand) -> None:
    """Protects terminals from what a model wrote; a pipe gets it as it is."""
    stand.looks = [batch_document(status="completed", completed=1, output_file_id="file-2")]
    stand.contents = {"file-2": b'{"a": "\xc2\x9b2J\x1b[2J"}\n'}
    outer, inner = pty.openpty()
    process = start(stand, "results", "batch_1", stdout=inner)
    process.communicate(timeout=COMMAND_WAIT_S)
    os.close(inner)
    shown = os.read(outer, 65_536)
    os.close(outer)
    assert (process.returncode, shown) == (0, b'{"a": " 2J [2J"}\r\n')
