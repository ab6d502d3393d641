"""Protects `weir sim run`: its table and files, the same for the same seed, and bad options refused with what is right."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from weir.cli.sim import commands
from weir.sim.runs.svg import SERIES_MAX, Series, line_chart

SMALL = ("--workload", "poisson:4,in=200,out=20,tenants=<acme>:1/globex:1", "--engine", "demo", "--for", "20s")


def weir_sim(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`weir sim run` with these words."""
    command = [sys.executable, "-m", "weir.cli.main", "sim", "run", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment or None)


def test_a_run_prints_a_table_and_writes_its_files(tmp_path: Path) -> None:
    """Protects the command: figures on the terminal, the whole result as JSON, a page that is well-formed and escaped."""
    report, first, second = tmp_path / "r.html", tmp_path / "1.json", tmp_path / "2.json"
    shown = weir_sim(*SMALL, "--fault", "kill@10,start=1", "--report", report, "--json", first)
    assert shown.returncode == 0, shown.stderr
    assert "good/admitted" in shown.stdout and "times real time" in shown.stdout and "kill replica-001" in shown.stdout
    assert weir_sim(*SMALL, "--fault", "kill@10,start=1", "--json", second).returncode == 0
    assert first.read_bytes() == second.read_bytes()
    result = json.loads(first.read_text())
    assert result["spec"]["faults"] == ["kill@10,start=1"] and result["runs"][0]["total"]["offered"] > 40
    page = report.read_text()
    assert page.count("<svg ") == 4 and "&lt;acme&gt;" in page and "<acme>" not in page and "<script" not in page
    for drawing in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawing)


def test_a_full_run_has_the_same_document_and_the_door_is_shown(tmp_path: Path) -> None:
    """Protects the second fidelity: same options, files and tables, its name in the specification."""
    documents = []
    for fidelity in ("schedule", "full"):
        words = ["run", *SMALL, "--fidelity", fidelity, "--json", str(tmp_path / fidelity), "--report", str(tmp_path / "page")]
        shown = CliRunner().invoke(commands, words)
        assert shown.exit_code == 0, shown.output
        assert "wrongly refused" in shown.stdout and "wait error ms p50" in shown.stdout
        documents.append(json.loads((tmp_path / fidelity).read_text()))
    assert [document["spec"]["fidelity"] for document in documents] == ["schedule", "full"]
    assert shapes_of(documents[0]) == shapes_of(documents[1])
    assert "The door, by tenant" in (tmp_path / "page").read_text()


def shapes_of(value: Any) -> Any:
    """A document without its figures."""
    return {name: shapes_of(part) for name, part in value.items()} if isinstance(value, dict) else isinstance(value, list)


def test_several_seeds_and_a_trace_from_the_folder(tmp_path: Path) -> None:
    """Protects traces by name and runs side by side: each seed has its row, in the order asked for."""
    rows = "".join(f"{second / 2},{second % 3},100,10\n" for second in range(20))
    (tmp_path / "small.csv").write_text("t_s,tenant,input_tokens,output_tokens\n" + rows)
    out = tmp_path / "out.json"
    words = ("--trace", "small", "--engine", "flat:500", "--seed", "5,2-3", "--json", out, "--policy", "fcfs")
    shown = weir_sim(*words, WEIR_TRACES=str(tmp_path), PYTHONPATH=":".join(sys.path))
    assert shown.returncode == 0, shown.stderr
    result = json.loads(out.read_text())
    assert [run["seed"] for run in result["runs"]] == [5, 2, 3]
    assert result["spec"]["workload"] == "small.csv" and result["spec"]["duration_s"] == 9.5
    assert [run["total"]["offered"] for run in result["runs"]] == [20, 20, 20]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "one of --workload and --trace"),
        (("--workload", "poisson:1", "--trace", "x"), "one of --workload and --trace"),
        (("--workload", "poisson:0"), "from 0.001 to 10,000"),
        (("--workload", "poisson:1", "--replicas", "0"), "from 1 to 1,024"),
        (("--workload", "poisson:1", "--concurrency", "many"), "from 1 to 65,536"),
        (("--workload", "poisson:1", "--engine", "none"), "known: demo"),
        (("--workload", "poisson:1", "--policy", "luck"), "fair or fcfs"),
        (("--workload", "poisson:1", "--fault", "kill@1,replica=2"), "from 1 to 1"),
        (("--workload", "poisson:1", "--seed", "3-1"), "1,2,5-8"),
        (("--workload", "poisson:1", "--fidelity", "high"), "schedule or full"),
        (("--workload", "poisson:1", "--fault", "slow-clients@1"), "takes --fidelity full, not 'schedule'"),
        (("--workload", "poisson:1", "--fault", "noisy@1"), "one of tenant-1"),
        (("--workload", "poisson:1", "--for", "soon"), "like 90, 90s, 15m or 1h"),
        (("--workload", "poisson:1", "--weight", "nobody=2"), "a tenant that asks"),
        (("--workload", "poisson:1", "--deadline-ms", "0"), "from 1 to 3,600,000"),
        (("--workload", "poisson:1", "--report", "no/such/folder/r.html"), "a folder that exists"),
        (("--trace", "missing"), "by name in --traces"),
    ],
)
def test_bad_options_exit_with_2_and_say_what_is_accepted(words: tuple[str, ...], said: str) -> None:
    """Protects people from runs that they did not mean, and from tracebacks."""
    shown = CliRunner().invoke(commands, ["run", *words])
    assert shown.exit_code == 2 and said in shown.stderr and shown.stderr.startswith("weir: "), shown.output


def test_a_chart_shows_gaps_lone_points_and_nothing_at_all() -> None:
    """Protects plots: a gap interrupts a line, a lone value is a dot, and an empty chart is still one."""
    drawing = line_chart("a <title>", "ms", 10, [Series("line", [1, 2, None, 4, None]), Series("<none>", [])])
    root = ElementTree.fromstring(drawing)
    assert root.attrib["aria-label"] == "a <title>"
    paths = [
        element.attrib["d"] for element in root.iter() if element.tag.endswith("path") and element.attrib.get("fill") == "none"
    ]
    assert paths[0].count("M") == 2 and paths[0].endswith("h1") and paths[1] == ""
    assert "<path" in line_chart("empty", "ms", 10, [])
    with pytest.raises(AssertionError):
        line_chart("many", "ms", 1, [Series("x", [])] * (SERIES_MAX + 1))
