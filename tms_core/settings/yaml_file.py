"""A YAML reader that rejects duplicate keys, because only the last value of a key would count.

It limits the size of a file, and of its values with the contents of all aliases. Otherwise a few lines of aliases of
aliases could stand for gigabytes, which the error of an invalid value would write out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tms_core.errors import ConfigurationError

#: The maximum size of a file in bytes, and of a value with the contents of its aliases in characters.
_MAX_BYTES, _MAX_CHARACTERS = 1 << 20, 1 << 24


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, except that it rejects duplicate keys and too large values."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        #: The size of each complete list and mapping in characters, by the identity of its node.
        self._sizes: dict[int, int] = {}

    def compose_sequence_node(self, anchor: Any) -> yaml.SequenceNode:
        node = super().compose_sequence_node(anchor)
        self._measure(node, node.value)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is a list or a mapping", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is defined twice", problem_mark=key.start_mark)
            seen.add(key.value)
        self._measure(node, [part for pair in node.value for part in pair])
        return node

    def _measure(self, node: yaml.CollectionNode, children: list[yaml.Node]) -> None:
        # A list or mapping without a size is incomplete: it contains an alias of itself.
        sizes = (
            len(child.value) if isinstance(child, yaml.ScalarNode) else self._sizes.get(id(child), _MAX_CHARACTERS)
            for child in children
        )
        self._sizes[id(node)] = size = len(children) + sum(sizes)
        if size > _MAX_CHARACTERS:
            problem = f"a value has more than {_MAX_CHARACTERS} characters with the contents of its aliases"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


_YAML_HINT = "Correct the file. conf/standalone.yaml has every setting with its default."


def parse(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        yaml.YAMLError, ValueError: the text is not YAML, or its value is too large or nested too deeply.
    """
    try:
        return _Loader(text).get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error


def read(file: Path, source: str = "--config FILE") -> dict[Any, object]:
    """Return the mapping in a YAML file; empty for an empty file.

    Args:
        source: the option or environment variable that names the file, for the hint.

    Raises:
        ConfigurationError: the file cannot be read, is too large, is not a mapping in YAML, or defines a key twice.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ConfigurationError(
                f"the configuration file {file} has more than {_MAX_BYTES} bytes, the limit.",
                f"Pass a file with settings: {source}.",
            )
        content = parse(data.decode())
    except OSError as error:
        raise ConfigurationError(
            f"the configuration file {file} cannot be read: {error.strerror}.",
            f"Pass an existing file that this user can read: {source}.",
        ) from error
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigurationError(f"file {file}{line} is not YAML: {error.problem}.", _YAML_HINT) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"file {file} is not YAML: {error}.", _YAML_HINT) from error
    if not isinstance(content, dict | None):
        raise ConfigurationError(f"file {file} is not a mapping.", "Write sections into it, such as `storage:`.")
    return content or {}
