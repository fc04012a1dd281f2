"""
The same training from a YAML file::

    python examples/text_transformer/cli.py fit --config examples/text_transformer/config.yaml
"""

from __future__ import annotations

from data import StandardLibraryText
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from model import ByteGPT


class TextCLI(LightningCLI):
    """Windows of text are as long as the model's context, said once."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.length", "data.length")


def main(arguments: list[str] | None = None) -> None:
    TextCLI(ByteGPT, StandardLibraryText, args=arguments)


if __name__ == "__main__":
    main()
