"""The figures of ``tools.architecture`` on trees small enough to count by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.architecture import (
    Dependencies,
    carriers,
    largest_constructor,
    largest_dataclass,
    main,
    overriding,
    read,
    repeated_names,
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A janitor of four packages, and a core of one module."""
    for name, text in {
        "tms_core/topic.py": "class Name:\n    pass\n",
        "janitor/__init__.py": "",
        "janitor/cli/run.py": "def run():\n    from janitor.sweep import scan\n    return scan\n",
        "janitor/sweep/scan.py": (
            '"""Nobody knows."""\n\n# somebody\nimport janitor.rules\n\n\n'
            "class Name:\n    def __init__(self, a, b, *, c):\n        self._a = a\n\n"
            "    def _step(self):\n        pass\n"
        ),
        "janitor/rules.py": "from dataclasses import dataclass\n\n\n@dataclass\nclass Cut:\n    at: int\n    by: str\n",
        "janitor/spark/task.py": (
            "from janitor.sweep.scan import Name\n\n\nclass Task(Name):\n    def _step(self):\n        pass\n"
        ),
        "tests/test_law.py": "assert True\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_dependencies_of_a_tree_follow_its_imports(tree: Path) -> None:
    dependencies = Dependencies.of(read(tree, ["janitor"]), "janitor")
    assert dependencies.edges == {"cli": {"sweep"}, "sweep": {"rules"}, "rules": set(), "spark": {"sweep"}}
    assert (dependencies.layers(), dependencies.cycles()) == (3, [])


def test_packages_that_import_each_other_are_a_cycle(tree: Path) -> None:
    (tree / "janitor/rules.py").write_text("import janitor.sweep.scan\n", encoding="utf-8")
    assert Dependencies.of(read(tree, ["janitor"]), "janitor").cycles() == [["rules", "sweep"]]


def test_files_that_import_each_other_for_types_are_a_cycle(tree: Path) -> None:
    assert Dependencies.of_files(read(tree, ["janitor"])).cycles() == []
    (tree / "janitor/rules.py").write_text(
        "if TYPE_CHECKING:\n    from janitor.sweep.scan import Name\n", encoding="utf-8"
    )
    assert Dependencies.of_files(read(tree, ["janitor"])).cycles() == [["janitor.rules", "janitor.sweep.scan"]]


def test_largest_and_repeated_classes_are_named(tree: Path) -> None:
    modules = read(tree, ["tms_core", "janitor"])
    assert largest_constructor(modules) == (3, "janitor.sweep.scan.Name")
    assert largest_dataclass(modules) == (2, "janitor.rules.Cut")
    assert repeated_names(modules) == {"Name": ["janitor.sweep.scan", "tms_core.topic"]}
    assert overriding(modules, "janitor.spark") == ["janitor.spark.task.Task"]


def test_code_lines_exclude_docstrings_and_comments(tree: Path) -> None:
    (scan,) = (module for module in read(tree, ["janitor"]) if module.name == "janitor.sweep.scan")
    assert (scan.lines, scan.code_lines()) == (12, 6)


def test_missed_bar_is_exit_code_1(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--no-trace"], tree) == 1
    assert main(["--no-trace"], tree) == 0
    missed = [line for line in capsys.readouterr().out.splitlines() if "missed" in line]
    assert {line.split("  ")[0] for line in missed} == {
        "classes in spark that override private methods",
        "class names in two modules",
    }


def test_carriers_hold_the_store_or_a_record_that_does(tree: Path) -> None:
    (tree / "janitor/sweep/part.py").write_text(
        "@dataclass\nclass Part:\n    store: Reads | None\n    size: int\n\n\n"
        "class Event(NamedTuple):\n    part: Sequence[Part]\n\n\nclass Apart(NamedTuple):\n    rows: int\n\n\n"
        "class Worker:\n    store: Reads\n",
        encoding="utf-8",
    )
    assert carriers(read(tree, ["janitor"])) == {"Event": 1, "Part": 2}
