"""Bytes of Python's own standard library as a LightningDataModule."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# Long, well documented modules that every supported Python version ships as source.
SOURCES = (
    "argparse.py",
    "datetime.py",
    "doctest.py",
    "inspect.py",
    "shutil.py",
    "socket.py",
    "subprocess.py",
    "tarfile.py",
    "threading.py",
    "typing.py",
)


class Windows(Dataset):
    """Windows of ``length`` bytes, side by side, each with the same window moved on by one byte as its target."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        window = self.text[start : start + self.length + 1].long()
        return window[:-1], window[1:]


class StandardLibraryText(LightningDataModule):
    """Source text of ten standard library modules, byte by byte; the last tenth of each is kept for validation.

    Batches are ``(bytes [N, length], next bytes [N, length])``, int64 in 0..255.
    """

    def __init__(self, batch_size: int = 16, length: int = 128) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.length = length

    def setup(self, stage: str) -> None:
        train = bytearray()
        validation = bytearray()
        for name in SOURCES:
            text = read_source(name)
            border = len(text) * 9 // 10
            train += text[:border]
            validation += text[border:]
        self.train_set = Windows(torch.frombuffer(train, dtype=torch.uint8), self.length)
        self.validation_set = Windows(torch.frombuffer(validation, dtype=torch.uint8), self.length)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation_set, batch_size=self.batch_size)


def read_source(name: str) -> bytes:
    """Bytes of one standard library module.

    Raises:
        FileNotFoundError: this Python was installed without its sources.
    """
    path = Path(sysconfig.get_path("stdlib")) / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: this example reads the sources of Python's standard library, which this Python "
            "installation leaves out; run it with a Python from python.org, your distribution, conda or uv"
        )
    return path.read_bytes()
