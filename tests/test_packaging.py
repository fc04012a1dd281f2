from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_every_package_of_the_source_tree_is_installed() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    installed = set(config["options"]["packages"].split())
    in_tree = {
        ".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / "lightning_memopt").rglob("__init__.py")
    }
    assert installed == in_tree | {"lightning_memopt.cuda"}
    assert (ROOT / "cuda").is_dir()
    assert not (ROOT / "cuda" / "__init__.py").exists()


def test_the_licence_shipped_is_the_one_declared() -> None:
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


@pytest.mark.parametrize("target", ["demo", "test", "lint", "types"])
def test_the_makefile_has_the_commands_that_the_readme_names(target: str) -> None:
    assert re.search(rf"^{target}: \$\(VENV\)/", (ROOT / "Makefile").read_text(), re.MULTILINE)
