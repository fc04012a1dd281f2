"""
The same training from a YAML file::

    python examples/digits_snntorch/cli.py fit --config examples/digits_snntorch/config.yaml
"""

from __future__ import annotations

from data import DigitsData
from lightning.pytorch.cli import LightningCLI
from model import DigitsClassifier


def main(arguments: list[str] | None = None) -> None:
    LightningCLI(DigitsClassifier, DigitsData, args=arguments)


if __name__ == "__main__":
    main()
