"""Scikit-learn's handwritten digits as a LightningDataModule."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset


class DigitsData(LightningDataModule):
    """1797 handwritten digits of 8x8 pixels, which ship with scikit-learn; every fifth is kept for validation.

    Batches are ``(images [N, 1, 8, 8] in 0..1, labels [N])``.
    """

    def __init__(self, batch_size: int = 128, split_seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target, dtype=torch.long)
        train, validation = train_test_split(
            range(len(labels)), test_size=0.2, stratify=labels, random_state=self.split_seed
        )
        self.train_set = TensorDataset(images[train], labels[train])
        self.validation_set = TensorDataset(images[validation], labels[validation])

    def train_dataloader(self) -> DataLoader:
        # Whole batches only: the last, shorter one would make its step's peak a different number.
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation_set, batch_size=self.batch_size)
