"""
Search beyond the first plan
============================

Level 1 checkpoints the regions with the largest inputs. The levels above it change that plan step by step, and every
change is judged by the peak of one real forward and backward pass:

* level 2 splits the region that holds the peak into smaller ones, as long as the peak falls;
* level 3 cuts the region that holds the peak into time chunks, twice as many each time, as long as the peak falls;
* level 4 removes checkpoints, most expensive first, where that does not raise the peak.

What makes it short
-------------------
Each measured step says which region holds the peak, and only a change of that region can lower it. A change
may move the peak elsewhere without lowering it: the parts of a split region store more inputs, which lifts the regions
behind it. Then the search follows the peak and changes that region too, and keeps all of it or nothing, according to
where the peak ends up. It stops where a step has shown that no change can help:

* a split cannot help if the parts' inputs and the largest part's own tensors already reach the peak;
* removing a checkpoint cannot help if what the plain region keeps does not fit between its forward and its backward.

All decisions follow from numbers that the ranks have exchanged, so all ranks take the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_memopt.checkpointing import RegionConfig
from lightning_memopt.planning.agree import Ranks
from lightning_memopt.planning.apply import set_config
from lightning_memopt.planning.candidates import Candidate
from lightning_memopt.planning.memory_budget import format_bytes
from lightning_memopt.planning.model_state import ModelState
from lightning_memopt.planning.observe import FLOPS_PER_BYTE
from lightning_memopt.planning.plan import Outcome, Trial
from lightning_memopt.planning.request import Progress
from lightning_memopt.planning.trial import NoGradientError, Profile, is_out_of_memory, run_forward, run_step

Layout = Mapping[str, RegionConfig]
"""The checkpointed regions, by path; all others run plain."""

# A split or a cut costs time in every step of the training: it has to lower the peak by this share at least.
_LEAST_GAIN = 0.005
# How often the search follows the peak from one region to the next before the changes must have lowered it.
_PATIENCE = 8


@dataclass(frozen=True)
class Measured:
    """One layout, measured by all ranks in one step each."""

    by_rank: tuple[Profile, ...]

    @property
    def peak_bytes(self) -> int | None:
        """Largest peak of all ranks; None if one of them ran out of memory (or refused the layout)."""
        peaks = [profile.peak_bytes for profile in self.by_rank if profile.peak_bytes is not None]
        return max(peaks) if len(peaks) == len(self.by_rank) else None

    @property
    def worst(self) -> Profile:
        """The profile that limits all ranks: out of memory soonest, else the highest peak; the lowest such rank."""
        failed = [profile for profile in self.by_rank if profile.peak_bytes is None]
        if failed:
            return min(failed, key=lambda profile: profile.progress)
        return max(self.by_rank, key=lambda profile: profile.peak_bytes or 0)

    @property
    def refused(self) -> str:
        """Why the layout could not run, empty if it could."""
        return next((profile.refused for profile in self.by_rank if profile.refused), "")

    @property
    def seconds(self) -> float:
        """Wall time of the slowest rank."""
        return max(profile.seconds for profile in self.by_rank)

    def lower_than(self, other: Measured) -> bool:
        """A peak that is clearly lower; while nothing fits, getting further before memory runs out."""
        if self.peak_bytes is None:
            fits_neither = other.peak_bytes is None and not self.refused
            return fits_neither and self.worst.progress > other.worst.progress
        return other.peak_bytes is None or self.peak_bytes < (1 - _LEAST_GAIN) * other.peak_bytes


@dataclass(frozen=True)
class Move:
    """A change of some regions, with the layout it leads to."""

    action: str
    paths: tuple[str, ...]
    layout: Layout
    splits: bool = False


@dataclass(frozen=True)
class Found:
    """Result of a search."""

    layout: Layout
    plain: Measured
    final: Measured
    trials: tuple[Trial, ...]
    passes: int
    """Forward+backward passes."""
    forwards: int
    """Forward passes alone, in which time chunks were compared with the whole sequence."""
    forward_ms: Mapping[str, float]
    """Forward time of the regions in ms (CUDA only)."""
    split: frozenset[str]
    """The regions that were replaced by their parts."""


class Search:
    """The state of one search: the layout so far, what was measured for it, and what was tried.

    Args:
        candidates: everything that may become a region, by path, in model order.
        parts: for each region that can be split, the paths of its parts.
        chunkable: the regions that may be cut along time.
    """

    def __init__(
        self,
        model: nn.Module,
        example_forward: Callable[[nn.Module], object],
        *,
        candidates: Mapping[str, Candidate],
        parts: Mapping[str, Sequence[str]],
        chunkable: frozenset[str],
        state: ModelState,
        ranks: Ranks,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self._model = model
        self._example_forward = example_forward
        self._candidates = candidates
        self._parts = parts
        self._chunkable = chunkable
        self._state = state
        self._ranks = ranks
        self._device = device
        self._progress = progress
        self._trials: list[Trial] = []
        self._passes = 0
        self._forwards = 0
        self._known: dict[frozenset[tuple[str, RegionConfig]], Measured] = {}
        self._noted: set[int] = set()  # ids of those in _known that a trial tells of
        self._proven: set[tuple[str, int]] = set()  # time chunks that gave what the whole sequence gives
        self._forward_ms: dict[str, float] = {}
        self._layout: Layout = {}
        self._split: frozenset[str] = frozenset()
        self._plain: Measured
        self._now: Measured

    def run(self, first: Sequence[Candidate], level: int) -> Found:
        """Measure the plain model and the first layout, search up to ``level``, and leave the result in place."""
        self._progress("measuring", 0, 2)
        self._plain = self._measure({}, "measuring the plain model")
        self._note(0, Move("plain model", (), {}), "measured", self._plain)
        self._progress("measuring", 1, 2)
        self._layout = {c.region.path: c.config for c in first if c.config is not None}
        self._now = self._measure(self._layout, "measuring the first plan")
        self._note(1, Move(f"checkpoint {len(self._layout)} regions", tuple(self._layout), {}), "measured", self._now)
        self._first, self._first_measured = self._layout, self._now
        self._progress("measuring", 2, 2)
        if level >= 2:
            self._lower_peak(2, "splitting regions", budget=2 * len(self._layout))
        if level >= 3:
            self._cut_along_time()
        if level >= 4:
            self._remove_costly()
        self._treat(self._layout)
        return Found(
            layout=self._layout,
            plain=self._plain,
            final=self._now,
            trials=tuple(self._trials),
            passes=self._passes,
            forwards=self._forwards,
            forward_ms=self._forward_ms,
            split=self._split,
        )

    # -----------------------------------------------------------------------------------------------------------------
    # Levels 2 and 3: change the region that holds the peak

    def _cut_along_time(self) -> None:
        """Level 3, from the layout that level 2 found, and from the first plan if that may end lower."""
        budget = 2 * len(self._layout)
        start = self._layout, self._now, self._split
        begun = self._passes
        self._lower_peak(3, "cutting regions along time", budget)
        if not start[2]:
            return
        with_splits = self._layout, self._now, self._split
        self._layout, self._now, self._split = self._first, self._first_measured, frozenset()
        self._lower_peak(3, "cutting regions along time", budget - (self._passes - begun), splits=False)
        if not self._now.lower_than(with_splits[1]):
            self._layout, self._now, self._split = with_splits

    def _lower_peak(self, level: int, phase: str, budget: int, *, splits: bool = True) -> None:
        """Change what holds the peak as long as it falls; ``budget``: the most steps that may be measured for it.

        It is two for each region at most: what trying every region once, with a warm-up step each, would take.
        """
        last = self._passes + budget
        self._progress(phase, 0, budget)
        while self._passes < last and self._follow_peak(level, last, splits=splits):
            self._progress(phase, budget - (last - self._passes), budget)
        self._progress(phase, budget, budget)

    def _follow_peak(self, level: int, last: int, *, splits: bool) -> bool:
        """Change the region that holds the peak, then the one that holds it after that, until the peak has fallen.

        Returns whether there may be more to gain; if the peak has not fallen, the layout is as before.
        """
        before, layout, measured = self._now, self._layout, self._now
        tried: list[tuple[Move, Measured]] = []
        while len(tried) < _PATIENCE and self._passes < last:
            move = self._move(level, layout, measured, before, splits=splits)
            if move is None:
                break
            last_profile = measured.worst
            measured = self._measure(move.layout, f"trying to {move.action}", may_refuse=level == 3)
            layout = move.layout
            tried.append((move, measured))
            if measured.lower_than(before):
                self._layout, self._now = layout, measured
                self._split |= {path for move, _ in tried if move.splits for path in move.paths}
                break
            if measured.peak_bytes is None and before.peak_bytes is not None:
                break
            if not move.splits and _no_lower(move.paths, last_profile, measured.worst):
                break
        kept = self._now is not before
        for move, result in tried:
            failed = result.peak_bytes is None and not result.refused
            if id(result) in self._noted and not kept:
                continue  # level 3 comes back to what level 2 tried in vain
            self._note(level, move, "kept" if kept else "out of memory" if failed else "undone", result)
        return kept or any(self._never_cut_again(move, result) for move, result in tried)

    def _never_cut_again(self, move: Move, result: Measured) -> bool:
        """Take regions whose time chunks were refused out of the search; says whether there were any."""
        if not result.refused:
            return False
        # The refusal starts with the name of the region; should it not, all that were cut are under suspicion.
        named = [path for path in move.paths if result.refused.startswith(f"{path} ")]
        self._chunkable -= set(named or move.paths)
        return True

    def _move(self, level: int, layout: Layout, measured: Measured, start: Measured, *, splits: bool) -> Move | None:
        """The next change: of the regions that hold the peak, if all of them can be changed."""
        critical = measured.worst.critical
        if not critical or not all(path in layout for path in critical):
            return None
        if level == 3 and all(self._chunks_after(path, layout) is not None for path in critical):
            return self._more_chunks(layout, measured.worst)
        # Parts run their forward as the whole does: only a backward gets smaller by splitting.
        if (
            splits
            and not measured.worst.in_forward
            and all(self._split_may_help(path, level, measured.worst, start) for path in critical)
        ):
            return self._into_parts(critical, layout)
        return None

    def _into_parts(self, paths: Sequence[str], layout: Layout) -> Move:
        parts = [part for path in paths for part in self._parts[path]]
        changed = {path: config for path, config in layout.items() if path not in paths}
        for part in parts:
            config = self._candidates[part].config
            assert config is not None
            changed.setdefault(part, config)
        return Move(f"split {_listed(paths)} into {len(parts)} regions", tuple(paths), changed, splits=True)

    def _split_may_help(self, path: str, level: int, profile: Profile, start: Measured) -> bool:
        """Whether the parts of ``path`` could stay below the peak that the changes started from.

        When the backward of its largest part runs, at least that part's input and own tensors are alive, on top of what
        was alive when the backward of the whole region began.
        """
        if path not in self._parts:
            return False
        if start.peak_bytes is None or not profile.before_backward.get(path):
            return True
        largest = max(
            self._candidates[part].stored_bytes + self._own_bytes(part) // self._most_chunks(part, level)
            for part in self._parts[path]
        )
        least = profile.before_backward[path] - self._candidates[path].stored_bytes + largest
        return least < start.peak_bytes

    def _own_bytes(self, path: str) -> int:
        """Bytes that the plain region keeps for its backward, without what it returns."""
        plain = self._plain.worst
        return max(plain.kept.get(path, 0) - plain.returned.get(path, 0), 0)

    def _more_chunks(self, layout: Layout, profile: Profile) -> Move:
        """Twice as many chunks for the regions that hold the peak, and for all that would hold it right after.

        Halving what the critical regions recompute lets the peak fall at most to where the next region is; all regions
        above the expected fall are cut at once.
        """
        fall = max(self._own_bytes(path) // (2 * layout[path].chunks) for path in profile.critical)
        goal = (profile.peak_bytes or 0) - fall
        near = [path for path in layout if profile.peaks.get(path, 0) > goal or path in profile.critical]
        changed = dict(layout)
        for path in near:
            changed[path] = self._chunks_after(path, layout) or layout[path]
        paths = tuple(path for path in near if changed[path] != layout[path])
        chunks = " and ".join(str(count) for count in sorted({changed[path].chunks for path in paths}))
        return Move(f"run {_listed(paths)} in {chunks} time chunks", paths, changed)

    def _chunks_after(self, path: str, layout: Layout) -> RegionConfig | None:
        """The region with twice as many chunks; None if it may not be cut, or into no more pieces."""
        argument, config = self._candidates[path].chunked_arg, layout[path]
        if path not in self._chunkable or argument is None or config.chunks >= argument.steps:
            return None
        chunks = min(2 * config.chunks, argument.steps)
        return replace(config, chunks=chunks, chunked_args=(argument.name,), time_dim=0, check_chunks=False)

    def _most_chunks(self, path: str, level: int) -> int:
        argument = self._candidates[path].chunked_arg
        return argument.steps if level == 3 and path in self._chunkable and argument is not None else 1

    # -----------------------------------------------------------------------------------------------------------------
    # Level 4: give back the time of checkpoints that the peak does not need

    def _remove_costly(self) -> None:
        if self._now.peak_bytes is None:
            return
        position = {path: index for index, path in enumerate(self._candidates)}
        order = sorted(self._layout, key=lambda path: (-self._cost(path), position[path]))
        for done, path in enumerate(order):
            self._progress("removing costly checkpoints", done, len(order))
            rest = {other: config for other, config in self._layout.items() if other != path}
            move = Move(f"remove the checkpoint of {path}", (path,), rest)
            too_high = self._known_rise(path)
            if too_high is not None:
                self._note(4, move, "not tried", None, f"would need at least {format_bytes(too_high)}")
                continue
            measured = self._measure(rest, f"trying to {move.action}")
            peak, peak_now = measured.peak_bytes, self._now.peak_bytes
            kept = peak is not None and peak_now is not None and peak <= peak_now
            self._note(4, move, "kept" if kept else "out of memory" if peak is None else "undone", measured)
            if kept:
                self._layout, self._now = rest, measured
        self._progress("removing costly checkpoints", len(order), len(order))

    def _cost(self, path: str) -> float:
        """Cost of running the region once more: ms on CUDA, elsewhere operations and bytes on one scale."""
        measured = self._forward_ms.get(path)
        seen = self._candidates[path].seen
        return measured if measured is not None else float(seen.flops + FLOPS_PER_BYTE * seen.moved_bytes)

    def _known_rise(self, path: str) -> int | None:
        """A peak that removing the checkpoint of ``path`` cannot stay below, if that is above the present one.

        Between its forward and its backward the region would keep what the plain region keeps, in place of its stored
        inputs. (It may be more: an input that only this region stores is not even counted.)
        """
        peak = self._now.peak_bytes
        if peak is None or self._plain.peak_bytes is None:
            return None
        for plain, now in zip(self._plain.by_rank, self._now.by_rank, strict=True):
            if path in plain.kept and path in now.kept:
                least = now.standing[path] + plain.kept[path] - now.kept[path]
                if least > peak:
                    return least
        return None

    # -----------------------------------------------------------------------------------------------------------------
    # Steps

    def _measure(self, layout: Layout, what: str, *, may_refuse: bool = False) -> Measured:
        """Treat the model as ``layout`` says and run one step on every rank; a layout is measured once."""
        key = frozenset(layout.items())
        if key in self._known:
            return self._known[key]
        self._passes += 1
        watched = layout if layout else self._candidates
        regions = {path: self._candidates[path].region.module for path in self._candidates if path in watched}

        unproven = {
            path: replace(config, check_chunks=True)
            for path, config in layout.items()
            if config.chunks > 1 and (path, config.chunks) not in self._proven
        }
        self._forwards += bool(unproven)

        def work() -> Profile:
            try:
                if unproven:
                    # A forward of its own: what the comparison with the whole sequence takes is no part of a step.
                    self._treat({**layout, **unproven})
                    run_forward(self._model, self._example_forward, self._state)
                self._treat(layout)
                return run_step(self._model, regions, self._example_forward, self._state, self._device)
            except ValueError as error:
                # The same step ran with other treatments: it is the time chunks that are not safe.
                if not may_refuse or isinstance(error, NoGradientError):
                    raise
                return Profile(None, (), refused=str(error))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return Profile(None, ())

        measured = Measured(tuple(self._ranks.together(what, work)))
        if not measured.refused:
            self._proven |= {(path, config.chunks) for path, config in unproven.items()}
        for path in regions:
            times = [profile.forward_ms[path] for profile in measured.by_rank if path in profile.forward_ms]
            if times:
                # The least of all steps: the first ones warm up. The most of all ranks: they wait for the slowest.
                self._forward_ms[path] = min(max(times), self._forward_ms.get(path, max(times)))
        self._known[key] = measured
        return measured

    def _treat(self, layout: Layout) -> None:
        for path, candidate in self._candidates.items():
            if candidate.config is not None:
                set_config(candidate.region.module, layout.get(path))

    def _note(self, level: int, move: Move, outcome: Outcome, measured: Measured | None, reason: str = "") -> None:
        peak = None if measured is None else measured.peak_bytes
        # A layout that was measured before takes no time again.
        seconds = 0.0 if measured is None or id(measured) in self._noted else measured.seconds
        if measured is not None:
            self._noted.add(id(measured))
            reason = measured.refused or ("ran out of memory" if peak is None else "")
        self._trials.append(Trial(level, move.action, move.paths, outcome, peak, seconds, reason))


def _no_lower(paths: Sequence[str], before: Profile, after: Profile) -> bool:
    """Whether cutting ``paths`` left the peaks of those that held the peak where they were."""
    critical = [path for path in before.critical if path in paths]
    return any(after.peaks.get(path, 0) >= before.peaks.get(path, 0) for path in critical)


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths) if len(paths) <= 3 else f"{', '.join(paths[:3])} and {len(paths) - 3} more"
