"""A YAML reader that rejects duplicate keys, because only the last value of a key would count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tms_core.errors import ConfigurationError


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, except that it rejects duplicate keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is a list or a mapping", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is defined twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


_YAML_HINT = "Correct the file. conf/standalone.yaml has every setting with its default."


def read(file: Path, source: str = "--config FILE") -> dict[Any, object]:
    """Return the mapping in a YAML file; empty for an empty file.

    Args:
        source: the option or environment variable that names the file, for the hint.

    Raises:
        ConfigurationError: the file cannot be read, is not YAML, is not a mapping, or defines a key twice.
    """
    try:
        loader = _UniqueKeys(file.read_text(encoding="utf-8"))
        content = loader.get_single_data()
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
