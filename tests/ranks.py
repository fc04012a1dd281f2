"""Run a function on several gloo ranks, each in a process of its own."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

# A rank that fails takes its peers down with errors of their own; they get this long to say so before they are ended.
_GRACE_S = 5.0


class RankError(RuntimeError):
    """At least one rank raised, died or hung; the message holds what each of them said."""


def run_ranks(fn: Callable[..., Any], world_size: int = 2, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``fn(rank, *args)`` on ``world_size`` processes of one gloo process group and return what each returned.

    ``fn`` must be importable (a function at the top of a test module). Each process has the environment variables that
    ``torchrun`` and Lightning read, so that ``Trainer(accelerator="cpu", devices=world_size, strategy="ddp")`` inside
    ``fn`` joins the group instead of starting processes. One thread per rank.

    Raises:
        RankError: With the traceback of each rank that raised. With where each rank stood, if one still ran after
            ``timeout`` seconds.
    """
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        port = _free_port()
        end = time.time() + timeout
        processes: list[BaseProcess] = [
            context.Process(target=_rank_main, args=(fn, rank, world_size, args, folder, port, end))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            hung = _wait(processes, end)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        if hung or any(process.exitcode for process in processes):
            raise RankError(_what_happened(processes, Path(folder), hung, timeout))
        # Written to files: tensors sent through a queue live in shared memory that ends with the process.
        return [torch.load(Path(folder, f"result{rank}.pt"), weights_only=False) for rank in range(world_size)]


def _rank_main(
    fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], folder: str, port: int, end: float
) -> None:
    stack_file = open(Path(folder, f"stack{rank}.txt"), "w")  # noqa: SIM115 - faulthandler writes to it until the end
    faulthandler.dump_traceback_later(max(end - time.time() - 1.0, 0.1), file=stack_file)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)
        result = fn(rank, *args)
        torch.save(result, Path(folder, f"result{rank}.pt"))
        if torch.distributed.is_initialized():  # the function may have ended it
            torch.distributed.destroy_process_group()
    except BaseException:
        Path(folder, f"error{rank}.txt").write_text(traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit(): leaving through the interpreter waits for the peers that wait for this rank.
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()


def _wait(processes: list[BaseProcess], end: float) -> bool:
    """Return whether a rank still ran at ``end`` although none had failed."""
    failed = False
    while any(process.is_alive() for process in processes):
        if time.time() > end:
            return not failed
        if not failed and any(process.exitcode for process in processes):
            failed = True
            end = min(end, time.time() + _GRACE_S)
        time.sleep(0.02)
    return False


def _what_happened(processes: list[BaseProcess], folder: Path, hung: bool, timeout: float) -> str:
    said = [f"{timeout:g} s were not enough" if hung else "not every rank returned"]
    for rank, process in enumerate(processes):
        error, stack = folder / f"error{rank}.txt", folder / f"stack{rank}.txt"
        if error.exists():
            said.append(f"rank {rank} raised:\n{error.read_text()}")
        elif hung and stack.exists() and stack.stat().st_size:
            said.append(f"rank {rank} stood here:\n{stack.read_text()}")
        elif process.exitcode:
            said.append(f"rank {rank} ended with exit code {process.exitcode} and no traceback")
    return "\n".join(said)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
