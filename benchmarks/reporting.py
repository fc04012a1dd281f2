"""
What every benchmark says of its run
====================================

Versions, device and command line that a reader needs to repeat it, on the console and in the JSON file.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and command line that a reader needs to repeat the run."""
    distributions = ("torch", "lightning", "spikingjelly", "torchvision", "lightning-memopt")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "versions": {distribution: version_of(distribution) for distribution in distributions},
        "python": platform.python_version(),
        "device": str(device),
        "device_name": name,
        "threads": torch.get_num_threads(),
        "command": shlex.join(["python", *sys.argv]),
    }


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_device(parser: argparse.ArgumentParser, device: str | None) -> None:
    """Refuse a device that is not here, as ``parser`` refuses other options."""
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda was asked for and torch finds no CUDA device; use --device cpu")


def console_of_width(least: int) -> Console:
    """A console on which lines of ``least`` characters are not broken, however narrow the terminal."""
    console = Console()
    console.width = max(console.width, least)
    return console


def print_environment(console: Console, about: Mapping[str, Any]) -> None:
    """Say on the console what :func:`environment` found."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    console.print(f"{about['device_name']}, {about['threads']} threads; {versions}")
    console.print(escaped(about["command"]))


def write_document(document: Mapping[str, Any], path: Path) -> None:
    """Write ``document`` to ``path`` as JSON; a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(json.dumps(document, indent=2) + "\n")
    unfinished.replace(path)


def escaped(text: str) -> str:
    """Text that rich prints as it is."""
    return text.replace("[", r"\[")
