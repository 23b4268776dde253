"""Generated files: each equals the output of its generator, so that diffs show changes."""

from __future__ import annotations

from pathlib import Path

import pytest

import charts.generate
from tools.reference import api, commands, configuration

ROOT = Path(__file__).parents[1]
GENERATED = {
    **charts.generate.files(),
    api.PAGE: api.page(),
    configuration.PAGE: configuration.page(),
    **{commands.FOLDER / f"{name}.md": commands.page(name) for name in commands.PROGRAMS},
}


@pytest.mark.parametrize("path", sorted(GENERATED), ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_file_equals_the_output_of_its_generator(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == GENERATED[path], "if the change is wanted, run: make generate"
