"""Measure the architecture: ``python -m tools.architecture``.

Most metrics are counts of files, imports and names in the source, from ``ast`` alone. The others trace a pass of the
janitor on the sample store and a publish over HTTP. ``--check`` exits with 1 if a metric misses its limit. Definitions:

* a package of ``janitor`` is a folder or module at its top level; a dependency is an import of one package by another,
  anywhere in a module; the number of layers is the length of the longest chain of dependencies;
* a cycle is a group of packages that import each other, directly or indirectly. Cycles of files cover ``janitor`` and
  ``tms_core`` together, and include imports for type annotations;
* lines of code exclude blank lines, comments and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import io
import math
import os
import socket
import sys
import tempfile
import threading
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("tms_core", "janitor")
#: The interface of a store; the other modules of its package are drivers.
_TABLES = "tms_core.tables.base"
#: The packages and modules with the records of a pass.
_PASS = ("janitor.run.", "janitor.sweep.", "janitor.spark.sweep.", "janitor.boundary")
_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Module:
    """A source file.

    Args:
        name: the import name.
        text: the source.
        tree: the parsed source.
    """

    name: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def package(self) -> str:
        """Return the name of the top-level package or module that contains the file."""
        return self.name.split(".")[1] if "." in self.name else ""

    def classes(self) -> Iterator[ast.ClassDef]:
        """Yield every class in the file."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def imports(self) -> Iterator[str]:
        """Yield every imported name, as ``package.module`` or ``package.module.name``."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def code_lines(self) -> int:
        """Return the number of lines without blank lines, comments and docstrings."""
        skipped = (
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
        )
        taken: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in skipped:
                taken.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                taken.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(taken)


def read(root: Path, packages: Sequence[str]) -> list[Module]:
    """Return the modules of packages, sorted by path."""
    found = []
    for path in sorted(chain.from_iterable((root / package).rglob("*.py") for package in packages)):
        text = path.read_text(encoding="utf-8")
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        found.append(Module(name, text, ast.parse(text)))
    return found


# --- packages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dependencies:
    """A graph of imports between packages.

    Args:
        edges: the imported packages of each package.
    """

    edges: dict[str, set[str]]

    @classmethod
    def of(cls, modules: Iterable[Module], package: str) -> Dependencies:
        """Return the dependencies of the packages of ``package``."""
        own = [module for module in modules if module.name.startswith(f"{package}.")]
        edges: dict[str, set[str]] = {module.package: set() for module in own if not module.package.startswith("__")}
        for module in own:
            named = (name.split(".") for name in module.imports())
            to = {parts[1] for parts in named if len(parts) > 1 and parts[0] == package}
            if module.package in edges:
                edges[module.package] |= (to & set(edges)) - {module.package}
        return cls(edges)

    @classmethod
    def of_files(cls, modules: Sequence[Module]) -> Dependencies:
        """Return the dependencies of files, with each file as a package."""
        names = {module.name for module in modules}
        edges: dict[str, set[str]] = {}
        for module in modules:
            named = ((name, name.rpartition(".")[0]) for name in module.imports())
            edges[module.name] = {next((one for one in pair if one in names), module.name) for pair in named}
            edges[module.name] -= {module.name}
        return cls(edges)

    def cycles(self) -> list[list[str]]:
        """Return the groups of packages that import each other."""
        reach = {package: self._reachable(package) for package in self.edges}
        groups = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in reach if a in reach[a]}
        return [list(group) for group in sorted(groups)]

    def layers(self) -> int:
        """Return the number of packages on the longest path; each package of a cycle counts as a layer."""
        cycles = {package: cycle for cycle in self.cycles() for package in cycle}
        heights: dict[str, int] = {}

        def height(package: str) -> int:
            if package not in heights:
                group = cycles.get(package, [package])
                below = set().union(*(self.edges[member] for member in group)) - set(group)
                reached = len(group) + max(map(height, below), default=0)
                heights.update(dict.fromkeys(group, reached))
            return heights[package]

        return max(map(height, self.edges), default=0)

    def _reachable(self, start: str) -> set[str]:
        reached: set[str] = set()
        waiting = list(self.edges[start])
        while waiting:
            package = waiting.pop()
            if package not in reached:
                reached.add(package)
                waiting.extend(self.edges[package])
        return reached


# --- classes ---------------------------------------------------------------------------------------------------------


def largest_constructor(modules: Iterable[Module]) -> tuple[int, str]:
    """Return the class whose ``__init__`` has the most arguments, with their number."""
    found = [(0, "")]
    for module in modules:
        for owner in module.classes():
            for node in owner.body:
                if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                    found.append((len(named) - 1, f"{module.name}.{owner.name}"))
    return max(found)


def largest_dataclass(modules: Iterable[Module]) -> tuple[int, str]:
    """Return the dataclass with the most fields, with their number."""
    found = [(0, "")]
    for module in modules:
        for owner in module.classes():
            if any("dataclass" in ast.unparse(decorator) for decorator in owner.decorator_list):
                fields = [node for node in owner.body if isinstance(node, ast.AnnAssign)]
                found.append((len(fields), f"{module.name}.{owner.name}"))
    return max(found)


def carriers(modules: Iterable[Module]) -> dict[str, int]:
    """Return the records that carry the context of a pass, with their numbers of fields.

    A dataclass or named tuple carries the context if a field has the store, the state, or another carrying record.
    """
    found: dict[str, tuple[int, set[str]]] = {}
    for module in modules:
        if module.name.startswith(_PASS):
            for owner in module.classes():
                fields = [node for node in owner.body if isinstance(node, ast.AnnAssign)]
                kinds = {ast.unparse(node) for node in (*owner.decorator_list, *owner.bases)}
                if any("dataclass" in kind or kind == "NamedTuple" for kind in kinds):
                    words = {
                        word.id for node in fields for word in ast.walk(node.annotation) if isinstance(word, ast.Name)
                    }
                    found[owner.name] = (len(fields), words)
    carrying = {"Outcome"} & found.keys()
    roots = {"Reads", "Store", "State", "MetadataReads", "StoreRecord"}
    while more := {name for name, (_, words) in found.items() if words & (roots | carrying)} - carrying:
        carrying |= more
    return {name: found[name][0] for name in sorted(carrying)}


def overriding(modules: Sequence[Module], below: str) -> list[str]:
    """Return the classes in a package that override a private method of a class of this project."""
    methods: dict[str, set[str]] = defaultdict(set)
    parents: dict[str, set[str]] = defaultdict(set)
    for owner in chain.from_iterable(module.classes() for module in modules):
        methods[owner.name] |= {
            node.name for node in owner.body if isinstance(node, _DEFINITION) and _is_private(node.name)
        }
        parents[owner.name] |= {ast.unparse(base).split("[")[0].split(".")[-1] for base in owner.bases} - {owner.name}

    def inherited(name: str) -> set[str]:
        known = parents.get(name, set()) & methods.keys()
        return set().union(*(methods[parent] | inherited(parent) for parent in known))

    return [
        f"{module.name}.{owner.name}"
        for module in modules
        if module.name.startswith(f"{below}.")
        for owner in module.classes()
        if {node.name for node in owner.body if isinstance(node, _DEFINITION)} & inherited(owner.name)
    ]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def repeated_names(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return the names of top-level classes that several modules define, with these modules."""
    where: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for name in sorted({node.name for node in module.tree.body if isinstance(node, ast.ClassDef)}):
            where[name].append(module.name)
    return {name: names for name, names in sorted(where.items()) if len(names) > 1}


# --- one pass, traced ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Trace:
    """The calls between ``run_once`` and its return.

    Attributes:
        frames: the frames of the first delete, from the callee of ``run_once`` down to the store's method.
        modules: the modules with a called function.
    """

    frames: int = 0
    modules: set[str] | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in {"call", "return"}:
            return
        name, function = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if function == "run_once" and name.startswith("janitor"):
            if event == "call" and self.modules is None:
                self.modules = {name}
            elif event == "return":
                sys.setprofile(None)
        elif self.modules is not None and event == "call" and _package(frame) in PACKAGES:
            self.modules.add(name)
            if not self.frames and name.startswith("tms_core.tables") and function.startswith("delete"):
                self.frames = _depth(frame)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _depth(frame: FrameType) -> int:
    """Return the number of frames of this project below ``run_once``; 0: ``run_once`` is not above the frame."""
    depth, above = 1, frame.f_back
    while above is not None:
        if above.f_code.co_name == "run_once":
            return depth
        depth += _package(above) in PACKAGES
        above = above.f_back
    return 0


def trace_one_pass() -> Trace:
    """Trace one pass with one worker over a fresh copy of the sample store."""
    demo = import_module("examples.demo")
    clock = import_module("tms_core.clock").SystemClock()
    execute: Callable[..., int] = import_module("janitor.cli.main").execute
    trace = Trace()
    workers = os.environ.get("TMS_JANITOR__WORKERS")
    os.environ["TMS_JANITOR__WORKERS"] = "1"
    try:
        with tempfile.TemporaryDirectory() as folder, _silence():
            store, snapshots = demo.unpack(Path(folder) / "sample", clock)
            sys.setprofile(trace)
            threading.setprofile(trace)
            try:
                options = ["--leveldb", str(store), "--snapshots", str(snapshots), "--log-format", "text"]
                execute(["run", "--once", "--adopt", *options], clock)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
    finally:
        if workers is None:
            del os.environ["TMS_JANITOR__WORKERS"]
        else:
            os.environ["TMS_JANITOR__WORKERS"] = workers
    return trace


#: The number of publishes for warm-up, and of counted publishes, of which the minimum excludes other work of the loop.
_PUBLISHED_BEFORE, _COUNTED = 5, 5
_PUBLISH = b"POST /v1/namespaces/default/topics/traced/publish HTTP/1.1\r\nHost: localhost\r\n"
#: A message of three bytes outside a transaction, in Avro.
_PUBLISH += b"Content-Type: avro/binary\r\nContent-Length: 7\r\n\r\n\x02\x02\x06abc\0"


def trace_one_publish() -> list[str]:
    """Return the module of each call of this project's code during a publish over HTTP on LevelDB."""
    serving = import_module("tms_core.server.serving").serving
    # Every traced write is slow, and the event loop would run slow writes in a thread.
    workers: Any = import_module("tms_core.messaging.publish.workers")
    workers.QUICK_SECONDS = math.inf
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and _package(frame) in PACKAGES:
            called.append(str(frame.f_globals["__name__"]))

    with tempfile.TemporaryDirectory() as folder, _silence():
        environ = {"TMS_SERVER__PORT": "0", "TMS_TRANSACTIONS__SOURCE": "none"}
        threading.setprofile(note)
        try:
            with serving(None, environ, {"leveldb": f"{folder}/messaging"}, janitor=False) as server:
                return min((_published(server.url, called) for _ in range(_COUNTED)), key=len)
        finally:
            threading.setprofile(None)


def _published(url: str, called: list[str]) -> list[str]:
    """Return the calls of a publish on a connection that has published before."""
    address = url.rpartition("/")[2].split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        topic = _PUBLISH.partition(b"/publish")[0].replace(b"POST", b"PUT")
        connection.sendall(topic + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
        connection.recv(4096)
        for _ in range(_PUBLISHED_BEFORE):
            connection.sendall(_PUBLISH)
            if not connection.recv(4096).startswith(b"HTTP/1.1 200"):
                raise RuntimeError("the server rejected a publish")
        # The server makes its last calls for the previous publish after the response.
        time.sleep(0.05)
        called.clear()
        connection.sendall(_PUBLISH)
        connection.recv(4096)
        time.sleep(0.05)
        return list(called)


@contextmanager
def _silence() -> Iterator[None]:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A metric in the table.

    Args:
        name: the name of the metric.
        value: the measured value.
        at_most: the limit; None: the metric has no limit.
        details: the classes, packages or files behind the value.
    """

    name: str
    value: int
    at_most: int | None = None
    details: str = ""

    @property
    def missed(self) -> bool:
        return self.at_most is not None and self.value > self.at_most


class Architecture:
    """The metrics of a source tree.

    Args:
        root: the folder with the packages and the tests.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root

    @cached_property
    def modules(self) -> list[Module]:
        return read(self.root, PACKAGES)

    def rows(self) -> list[Row]:
        """Return the metrics of the source."""
        return [*self._size(), *self._packages(), *self._classes()]

    def traced(self) -> list[Row]:
        """Return the metrics of a traced pass and a traced publish."""
        trace = trace_one_pass()
        entered = {name for name in trace.modules or () if name == _TABLES or not name.startswith("tms_core.tables.")}
        own = [module for module in self.modules if module.name in entered and module.name.startswith("janitor.")]
        read_for = [module for module in own if module.package not in {"cli", "state", "app"}]
        return [
            Row("frames from run_once to a delete", trace.frames, 9),
            Row("modules entered by a pass, without the store's driver", len(entered), 32),
            Row("janitor modules entered, without cli, app and state", len(read_for), 18),
            Row("their lines", sum(module.lines for module in read_for), 4500),
            *self._published(),
        ]

    def _published(self) -> list[Row]:
        called = trace_one_publish()
        return [
            Row("Python calls of one plain publish over HTTP", len(called), 90),
            Row("modules that they enter", len(set(called)), 15),
        ]

    def _size(self) -> list[Row]:
        flat = {package: len(list((self.root / package).glob("*.py"))) for package in PACKAGES}
        tests = sum(module.lines for module in read(self.root, ["tests"]))
        return [
            Row("modules", len(self.modules)),
            Row("lines", sum(module.lines for module in self.modules), 57_000),
            Row("lines of code only", sum(module.code_lines() for module in self.modules), 35_000),
            Row("files in one folder, without cli", *self._largest_folder()),
            Row("files flat at the top of a package", max(flat.values()), 5, max(flat, key=lambda name: flat[name])),
            Row("lines of tests", tests, 85_000),
        ]

    def _largest_folder(self) -> tuple[int, int, str]:
        files = Counter(str(path.parent.relative_to(self.root)) for path in self._files() if path.parent.name != "cli")
        folder, number = max(files.items(), key=lambda found: found[1])
        return number, 12, folder

    def _files(self) -> Iterator[Path]:
        return chain.from_iterable((self.root / package).rglob("*.py") for package in PACKAGES)

    def _packages(self) -> list[Row]:
        plan = Dependencies.of(self.modules, "janitor")
        cycles, in_files = plan.cycles(), Dependencies.of_files(self.modules).cycles()
        return [
            Row("packages of janitor", len(plan.edges), 19),
            Row("layers of janitor", plan.layers(), 13),
            Row("dependencies between packages of janitor", sum(map(len, plan.edges.values())), 90),
            Row("cycles of janitor", len(cycles), 0, _named(cycles)),
            Row("cycles of files", len(in_files), 0, _named(in_files)),
        ]

    def _classes(self) -> list[Row]:
        private = overriding(self.modules, "janitor.spark")
        records = carriers(self.modules)
        repeated = repeated_names(self.modules)
        return [
            Row("largest constructor: arguments", *_with_bar(largest_constructor(self.modules), 7)),
            Row("largest dataclass: fields", *_with_bar(largest_dataclass(self.modules), None)),
            Row("records that carry one pass", len(records), 8, " ".join(records)),
            Row("their fields", sum(records.values()), 90),
            Row("classes in spark that override private methods", len(private), 0, " ".join(private)),
            Row("class names in two modules", len(repeated), 0, " ".join(repeated)),
        ]


def _named(cycles: list[list[str]]) -> str:
    return "; ".join(" ".join(cycle) for cycle in cycles)


def _with_bar(found: tuple[int, str], at_most: int | None) -> tuple[int, int | None, str]:
    return found[0], at_most, found[1]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Print the table; return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.architecture", description="Measure the architecture.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a metric misses its limit")
    parser.add_argument("--no-trace", action="store_true", help="skip the traces, which need the installed packages")
    wanted = parser.parse_args(arguments)
    architecture = Architecture(root)
    rows = architecture.rows() + ([] if wanted.no_trace else architecture.traced())
    for row in rows:
        bar = "" if row.at_most is None else f"≤ {row.at_most:,}"
        mark = "missed" if row.missed else ""
        print(f"{row.name:<55}{row.value:>8,}  {bar:<9}{mark:<8}{row.details[:120]}".rstrip())
    return int(wanted.check and any(row.missed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
