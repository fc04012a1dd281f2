"""Plans as data: files, digests, tables."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from lightning_memopt.checkpointing import region_config
from lightning_memopt.measuring import measure_memory
from lightning_memopt.planning import Plan, RegionPlan, Trial, applied_plan, apply_plan, optimize_memory
from lightning_memopt.planning.plan import BytesAlive
from tests.planning_models import DeepSpikingBlock, SpikingBlock, is_if_neuron, loss_from_rest, spikes, split_deep_block


@pytest.fixture(scope="module")
def searched() -> tuple[nn.Module, Plan]:
    model = nn.Sequential(DeepSpikingBlock(), nn.Linear(64, 64))
    options: Any = {"level": 4, "split_fn": split_deep_block, "can_chunk": is_if_neuron}
    optimize_memory(model, DeepSpikingBlock, loss_from_rest(spikes()), **options)
    plan = applied_plan(model)
    assert plan is not None
    return model, plan


def printed(plan: Plan) -> str:
    console = Console(width=250)
    with console.capture() as capture:
        console.print(plan.table())
    return capture.get()


class TestFiles:
    def test_a_searched_plan_survives_the_file_with_everything_in_it(
        self, searched: tuple[nn.Module, Plan], tmp_path: Path
    ) -> None:
        _, plan = searched
        path = plan.save(tmp_path / "logs" / "plan.json")
        assert Plan.load(path) == plan
        assert Plan.load(str(path)).digest() == plan.digest()
        assert [entry.name for entry in path.parent.iterdir()] == ["plan.json"]

    def test_a_plan_from_a_file_treats_another_model_the_same_way(
        self, searched: tuple[nn.Module, Plan], tmp_path: Path
    ) -> None:
        model, plan = searched
        path = plan.save(tmp_path / "plan.json")
        twin = nn.Sequential(DeepSpikingBlock(), nn.Linear(64, 64))
        assert apply_plan(twin, path) is twin
        for (name, one), (_, other) in zip(model.named_modules(), twin.named_modules(), strict=True):
            assert region_config(one) == region_config(other), name

    def test_the_file_names_versions_device_and_trials(self, searched: tuple[nn.Module, Plan]) -> None:
        content = json.loads(searched[1].to_json())
        assert {"torch", "python", "lightning_memopt"} <= content["versions"].keys()
        assert content["device"] == "cpu"
        assert [trial["outcome"] for trial in content["trials"][:2]] == ["measured", "measured"]
        assert content["digest"] == searched[1].digest()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda c: c.update(format=2), "has format 2 and this version of lightning_memopt reads format 1"),
            (lambda c: c.pop("format"), "an entry 'format'"),
            (lambda c: c.pop("regions"), "'regions' must be a list"),
            (lambda c: c.update(regions=[3]), "'regions' must be a list of objects"),
            (lambda c: c.update(colour="red"), "Plan has no entry 'colour'"),
            (lambda c: c["regions"][0].update(size=1), "RegionPlan has no entry 'size'"),
            (lambda c: c["regions"][0].pop("path"), "RegionPlan is incomplete.*path"),
            (lambda c: c["regions"][0].update(treatment="forget"), "RegionPlan.treatment cannot be 'forget'"),
            (lambda c: c["regions"][0].update(compressor="zip"), "RegionPlan.compressor cannot be 'zip'"),
            (lambda c: c["regions"][0].update(chunks=0), "RegionPlan.chunks cannot be 0"),
            (lambda c: c["regions"][0].update(chunks=True), "RegionPlan.chunks cannot be True"),
            (lambda c: c["regions"][0].update(treatment="keep", chunks=2), "'0' is kept as it is, so it has no chunks"),
            (lambda c: c["regions"][0].update(treatment="keep", cheap_chunks=1), "'0' is kept as it is.*cheap_chunks"),
            (lambda c: c["regions"][0].update(chunked_args=[0.5]), "RegionPlan.chunked_args cannot be"),
            (lambda c: c["regions"][0].update(input_bytes="many"), "RegionPlan.input_bytes cannot be 'many'"),
            (lambda c: c.update(level=7), "Plan.level cannot be 7"),
            (lambda c: c.update(checkpoint_budget="tiny"), "Plan.checkpoint_budget cannot be 'tiny'"),
            (lambda c: c.update(versions={"torch": 2}), "Plan.versions cannot be"),
            (lambda c: c["trials"].append({"level": 1}), "Trial is incomplete"),
            (lambda c: c["regions"][0].update(path="other"), "it was edited or damaged. Remove the entry 'digest'"),
        ],
    )
    def test_a_damaged_file_is_refused_in_words(self, tmp_path: Path, change: Any, message: str) -> None:
        content = json.loads(Plan(regions=(RegionPlan("0", "Linear", "recompute", "why"),)).to_json())
        change(content)
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"plan.json: .*{message}"):
            Plan.load(path)

    def test_a_file_of_an_earlier_version_is_read(self) -> None:
        plan = Plan(regions=(RegionPlan("0", "Linear", "recompute", "why"),), memory_budget=9, peak_bytes_after=8)
        content = json.loads(plan.to_json())
        new = ("time_unit", "plain_time", "added_time", "measured_ms", "batch_size", "alive", "frontier")
        for name in new:
            del content[name]
        del content["regions"][0]["added_time"]
        assert Plan.from_json(json.dumps(content)) == plan

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda c: c["alive"].update(plain_bytes=[1, 2]), "plain_bytes has 2 numbers; 1 paths have 4 positions"),
            (lambda c: c["alive"].update(planned_bytes=[1, 2, 3, "4"]), "BytesAlive.planned_bytes cannot be"),
            (lambda c: c["alive"].update(colour="red"), "BytesAlive has no entry 'colour'"),
            (lambda c: c.update(alive=3), "Plan.alive cannot be 3"),
            (lambda c: c.update(frontier=[[1, 2, 3]]), "Plan.frontier cannot be"),
            (lambda c: c.update(time_unit="hours"), "Plan.time_unit cannot be 'hours'"),
            (lambda c: c.update(plain_time="long"), "Plan.plain_time cannot be 'long'"),
        ],
    )
    def test_what_explains_a_plan_is_checked_too(self, change: Any, message: str) -> None:
        alive = BytesAlive(("0",), (1, 2, 3, 4), (1, 2, 3, 4), (1, None, 3, None))
        content = json.loads(Plan(regions=(), alive=alive, frontier=((1, 0.5),)).to_json())
        change(content)
        with pytest.raises(ValueError, match=message):
            Plan.from_json(json.dumps(content))

    def test_a_plan_edited_on_purpose_is_read_once_the_digest_is_gone(self) -> None:
        content = json.loads(Plan(regions=(RegionPlan("0", "Linear", "recompute", "why"),)).to_json())
        content["regions"][0]["path"] = "1"
        del content["digest"]
        assert Plan.from_json(json.dumps(content)).regions[0].path == "1"

    def test_a_byte_order_mark_as_editors_write_it_is_no_part_of_the_plan(self, tmp_path: Path) -> None:
        plan = Plan(regions=(RegionPlan("0", "Linear", "recompute", "why"),))
        path = tmp_path / "plan.json"
        path.write_text(plan.to_json(), encoding="utf-8-sig")
        assert Plan.load(path) == plan

    @pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000], ids=["nested", "digits"])
    def test_what_json_cannot_hold_is_no_valid_json(self, text: str) -> None:
        with pytest.raises(ValueError, match="This is not a plan: it is no valid JSON"):
            Plan.from_json(text)

    @pytest.mark.parametrize("text", ["", "nothing", "[]", '"plan"', "{}"])
    def test_what_is_no_plan_is_called_no_plan(self, text: str) -> None:
        with pytest.raises(ValueError, match="This is not a plan"):
            Plan.from_json(text)

    def test_a_missing_file_is_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no plan file '.*none.json'.*applied_plan\(model\).save"):
            Plan.load(tmp_path / "none.json")
        with pytest.raises(FileNotFoundError, match=r"no plan file 'none.json'"):
            apply_plan(nn.Sequential(SpikingBlock()), "none.json")


regions = st.builds(
    RegionPlan,
    path=st.text(),
    class_name=st.text(),
    treatment=st.sampled_from(["keep", "recompute"]),
    reason=st.text(),
    compressor=st.sampled_from([None, "bit"]),
    compressed_args=st.lists(st.integers(0, 9) | st.text()).map(tuple),
    chunks=st.integers(1, 64),
    chunked_args=st.lists(st.integers(0, 9) | st.text()).map(tuple),
    time_dim=st.integers(-4, 4),
    aliases=st.lists(st.text()).map(tuple),
    calls=st.integers(0),
    input_bytes=st.integers(0),
    saved_bytes=st.none() | st.integers(0),
    forward_ms=st.none() | st.floats(0, 1e6),
    added_time=st.none() | st.floats(0, 1e6),
).map(lambda region: dataclasses.replace(region, chunks=1) if region.treatment == "keep" else region)


@st.composite
def bytes_alive(draw: st.DrawFn) -> BytesAlive:
    paths = tuple(draw(st.lists(st.text(), max_size=3)))
    count = 2 * len(paths) + 2

    def column(item: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(item, min_size=count, max_size=count)))

    return BytesAlive(paths, column(st.integers(0)), column(st.integers(0)), column(st.none() | st.integers(0)))


trials = st.builds(
    Trial,
    level=st.integers(0, 4),
    action=st.text(),
    paths=st.lists(st.text()).map(tuple),
    outcome=st.sampled_from(["measured", "kept", "undone", "out of memory"]),
    peak_bytes=st.none() | st.integers(0),
    seconds=st.floats(0, 1e6),
)


@given(
    st.builds(
        Plan,
        regions=st.lists(regions, max_size=4).map(tuple),
        trials=st.lists(trials, max_size=3).map(tuple),
        level=st.integers(0, 4),
        compress=st.booleans(),
        peak_bytes_before=st.none() | st.integers(0),
        time_unit=st.sampled_from([None, "ms", "bytes moved"]),
        plain_time=st.none() | st.floats(0, 1e6),
        measured_ms=st.none() | st.floats(0, 1e6),
        batch_size=st.none() | st.integers(1),
        alive=st.none() | bytes_alive(),
        frontier=st.lists(st.tuples(st.integers(0), st.floats(0, 10))).map(tuple),
        versions=st.dictionaries(st.text(), st.text(), max_size=3),
    )
)
def test_any_plan_survives_json(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest() == plan.digest()


class TestDigest:
    region = RegionPlan("0", "Linear", "recompute", "why", compressor="bit", compressed_args=(0,), chunks=2)

    @pytest.mark.parametrize(
        "change",
        [
            {"path": "1"},
            {"treatment": "keep"},
            {"compressor": None},
            {"compressed_args": (1,)},
            {"chunks": 4},
            {"chunked_args": ("x",)},
            {"time_dim": -1},
        ],
    )
    def test_what_changes_the_model_changes_the_digest(self, change: dict[str, Any]) -> None:
        other = dataclasses.replace(self.region, **change)
        assert Plan(regions=(other,)).digest() != Plan(regions=(self.region,)).digest()

    def test_what_was_measured_and_said_does_not(self) -> None:
        told = dataclasses.replace(self.region, reason="other", input_bytes=3, forward_ms=1.0, aliases=("x",))
        kept = RegionPlan("9", "Linear", "keep", "small")
        plan = Plan(regions=(kept, told), level=4, peak_bytes_after=3, search_seconds=2.0, versions={"torch": "9"})
        assert plan.digest() == Plan(regions=(self.region,)).digest()

    def test_the_order_of_regions_does_not_matter(self) -> None:
        other = dataclasses.replace(self.region, path="1")
        assert Plan(regions=(other, self.region)).digest() == Plan(regions=(self.region, other)).digest()


class TestTable:
    def test_it_shows_regions_treatments_bytes_reasons_and_totals(self, searched: tuple[nn.Module, Plan]) -> None:
        _, plan = searched
        text = " ".join(printed(plan).split())
        for region in plan.regions:
            assert region.path in text
            assert region.class_name in text
        assert "Memory plan, level 4: peak" in text
        assert f"{len(plan.recomputed)} of {len(plan.regions)} recomputed" in text
        assert "split into 4 parts" in text
        assert f"{plan.search_passes} forward+backward passes" in text

    def test_bytes_are_in_mib_and_small_ones_do_not_read_zero(self) -> None:
        region = RegionPlan("0", "Linear", "recompute", "why", "bit", (0,), input_bytes=16 * 2**20, stored_bytes=2**14)
        text = printed(Plan(regions=(region,)))
        assert "16.0" in text
        assert "0.016" in text
        assert "recompute, 1-bit inputs" in text

    def test_sizes_below_the_last_digit_are_no_zero_and_in_no_scientific_notation(self) -> None:
        text = printed(Plan(regions=(RegionPlan("0", "Linear", "recompute", "why", input_bytes=32),)))
        assert "<0.001" in text
        assert "e-0" not in text

    def test_equal_regions_whose_paths_differ_in_a_number_share_a_row(self) -> None:
        alike = [RegionPlan(f"blocks.{i}", "Block", "recompute", "same", input_bytes=2**20) for i in range(4)]
        other = dataclasses.replace(alike[0], path="blocks.4", input_bytes=2**21)
        text = printed(Plan(regions=(*alike, other, dataclasses.replace(alike[0], path="blocks.7"))))
        assert "blocks.{0..3,7}" in text
        assert "5 Block" in text
        assert "blocks.4" in text
        assert "6 of 6 recomputed" in text

    def test_equal_parts_of_repeated_blocks_share_a_row_at_the_place_of_the_first(self) -> None:
        paths = [f"stages.{i}.blocks.{j}.{part}" for i in range(2) for j in range(3) for part in ("attn", "mlp")]
        text = printed(Plan(regions=tuple(RegionPlan(path, path[-3:], "recompute", "same") for path in paths)))
        attention, mlp = (f"stages.{{0,1}}.blocks.{{0..2}}.{part}" for part in ("attn", "mlp"))
        assert text.index(attention) < text.index(mlp)
        assert text.count("stages.") == 2
        assert "6 mlp" in text

    def test_equal_regions_of_other_names_have_rows_of_their_own(self) -> None:
        paths = ("stages.0.blocks.0", "stages.1.blocks.1", "head", "neck")
        text = printed(Plan(regions=tuple(RegionPlan(path, "Block", "keep", "same") for path in paths)))
        assert all(path in text for path in paths)

    def test_regions_with_further_names_are_not_folded_away(self) -> None:
        plan = Plan(regions=tuple(RegionPlan(f"b.{i}", "B", "keep", "why", aliases=(f"a.{i}",)) for i in range(3)))
        assert all(f"= a.{i}" in printed(plan) for i in range(3))

    def test_it_tells_the_time_that_is_added_and_what_it_is_counted_in(self) -> None:
        treated = RegionPlan("0", "Linear", "recompute", "why", added_time=3.0)
        plan = Plan((treated,), memory_budget=100, peak_bytes_after=90, plain_time=40.0, added_time=3.0)
        moved = " ".join(printed(dataclasses.replace(plan, time_unit="bytes moved")).split())
        assert "┃ time " in moved
        assert "time of a step +7.5% predicted (counted in bytes moved)" in moved
        assert moved.count("+7.5%") == 3
        timed = dataclasses.replace(plan, time_unit="ms", measured_ms=44.0)
        text = " ".join(printed(timed).split())
        assert "time of a step +7.5% predicted (40.0 -> 43.0 ms); +10.0% measured (44.0 ms, the first step)" in text
        assert timed.measured_share == pytest.approx(0.1)
        assert "┃ time " not in " ".join(printed(plan).split())

    def test_a_plan_for_a_budget_holds_what_is_needed_to_draw_it(self) -> None:
        model = nn.Sequential(*(DeepSpikingBlock() for _ in range(2)))
        forward = loss_from_rest(spikes())
        plain = measure_memory(lambda: forward(model).backward())
        model.zero_grad()
        # Whatever other tests left alive counts, too.
        budget = plain.start_bytes + (plain.peak_bytes - plain.start_bytes) * 6 // 10
        optimize_memory(model, example_forward=forward, memory_budget=budget)
        plan = applied_plan(model)
        assert plan is not None
        assert plan.alive is not None
        assert max(plan.alive.planned_bytes) == plan.predicted_peak_bytes
        assert max(plan.alive.plain_bytes) == pytest.approx(plain.peak_bytes, rel=0.1)
        measured = [size for size in plan.alive.measured_bytes if size is not None]
        assert 0.98 * plan.peak_bytes_after <= max(measured) <= plan.peak_bytes_after
        # Where a region runs, the prediction holds there, and not only at the peak.
        pairs = zip(plan.alive.planned_bytes, plan.alive.measured_bytes, strict=True)
        errors = sorted(abs(planned / found - 1) for planned, found in pairs if found is not None)
        assert errors[len(errors) // 2] <= 0.05
        peaks, times = zip(*plan.frontier, strict=True)
        assert list(peaks) == sorted(peaks)
        assert list(times) == sorted(times, reverse=True)
        assert plan.time_unit == "bytes moved"
        assert 0 < plan.added_share == pytest.approx(sum(r.added_time for r in plan.regions) / plan.plain_time)
        assert Plan.from_json(plan.to_json()) == plan

    def test_level_one_says_what_is_not_known_and_what_is(self) -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
        optimize_memory(model, nn.Linear, lambda m: m(spikes()), checkpoint_budget="balanced")
        plan = applied_plan(model)
        assert plan is not None
        text = " ".join(printed(plan).split())
        assert "75% of the forward FLOPs are recomputed" in text
        assert "not measured at level 1: use level 2, or MemoryMonitor" in text

    def test_flops_outside_of_all_regions_count_in_the_share(self) -> None:
        model = nn.Sequential(SpikingBlock(), nn.Linear(64, 64))
        optimize_memory(model, SpikingBlock, loss_from_rest(spikes()))
        plan = applied_plan(model)
        assert plan is not None
        assert plan.forward_flops == 2 * plan.regions[0].forward_flops > 0

    @pytest.mark.parametrize(
        ("outcomes", "expected"),
        [
            ([], "no other plan should be better than the first"),
            ([("split 0", "undone"), ("run 0", "undone")], "measured 2 plans beside the first: none was better"),
            ([("split 0", "out of memory")], "measured 1 plan beside the first: none was better"),
            ([("split 0", "undone"), ("remove 0", "kept")], "measured 2 plans beside the first (1 kept)"),
        ],
    )
    def test_the_caption_counts_what_was_tried(self, outcomes: list[tuple[Any, Any]], expected: str) -> None:
        trials = tuple(Trial(2, action, ("0",), outcome) for action, outcome in outcomes)
        region = RegionPlan("0", "Linear", "recompute", "why")
        text = printed(Plan(regions=(region,), level=4, trials=trials, search_passes=2))
        assert expected in " ".join(text.split())

    @pytest.mark.parametrize("width", [1, 10, 20, 40, 60])
    def test_it_can_be_printed_on_narrow_consoles(self, searched: tuple[nn.Module, Plan], width: int) -> None:
        console = Console(width=width)
        with console.capture() as capture:
            console.print(searched[1].table())
        assert capture.get().strip() or width == 1

    def test_on_80_columns_neither_names_nor_treatments_nor_sizes_are_broken(self) -> None:
        reason = "keep would move 12.1 MiB less, but the backward of layers.11 would take 3.2 MiB more than the budget"
        blocks = RegionPlan("", "TransformerEncoderLayer", "recompute", reason, "bit", (0,), input_bytes=1)
        blocks = dataclasses.replace(blocks, stored_bytes=2**33, saved_bytes=2**33, added_time=9.0)
        partly = dataclasses.replace(blocks, path="head", treatment="recompute_cheap", compressor=None, reason="why")
        layers = (dataclasses.replace(blocks, path=f"layers.{i}.attention") for i in range(2))
        plan = Plan((*layers, partly), memory_budget=2**34, peak_bytes_after=2**33, time_unit="ms", plain_time=90.0)
        console = Console(width=80)
        with console.capture() as capture:
            console.print(plan.table())
        lines = capture.get().splitlines()
        assert max(map(len, lines)) <= 80
        for unbroken in (
            "layers.{0,1}.attention",
            "recompute, 1-bit inputs",
            "recompute_cheap",
            "2 TransformerEncoderLayer",
            "8192.0",
            "+10.0%",
        ):
            assert any(unbroken in line for line in lines), unbroken
        # The words of the reason stay whole as well.
        assert set(reason.split()) <= set(" ".join(lines).split())

    def test_the_foot_adds_up_the_treated_regions(self) -> None:
        sizes = {"input_bytes": 2**20, "stored_bytes": 2**21, "saved_bytes": 2**22}
        kept = RegionPlan("0", "Linear", "keep", "split", **sizes)
        inside = [RegionPlan(f"0.{i}", "Linear", how, "why", **sizes) for i, how in enumerate(("pack", "recompute"))]
        table = Plan((kept, *inside)).table()
        feet = {str(column.header): str(column.footer) for column in table.columns}
        assert feet["kept if\nplain"] == "8.0"
        assert feet["stored"] == "4.0"
        assert feet["region"] == "treated regions"
        unmeasured = [dataclasses.replace(region, saved_bytes=None) for region in (kept, *inside)]
        assert {str(column.header): str(column.footer) for column in Plan(tuple(unmeasured)).table().columns}[
            "inputs"
        ] == "2.0"

    def test_a_plan_from_shapes_claims_no_measurement(self) -> None:
        region = RegionPlan("0", "Linear", "recompute", "why")
        plan = Plan((region,), memory_budget=9, peak_bytes_after=8, search_passes=1, from_shapes=True)
        text = " ".join(printed(plan).split())
        assert "predicted from shapes" in text
        assert "measured step" not in text
        assert Plan.from_json(plan.to_json()) == plan

    def test_a_printed_plan_is_one_short_line(self, searched: tuple[nn.Module, Plan]) -> None:
        plan = searched[1]
        text = str(plan)
        assert len(text) < 120
        assert text.startswith(f"Plan(level 4, {len(plan.recomputed)} of {len(plan.regions)} regions recomputed, peak ")
        assert str(Plan(regions=())) == "Plan(level 1, 0 of 0 regions recomputed, peak not measured)"

    def test_names_with_brackets_are_printed_as_they_are(self) -> None:
        plan = Plan(regions=(RegionPlan("blocks[red]", "Linear", "keep", "why [bold]"),))
        assert "blocks[red]" in printed(plan)
        assert "why [bold]" in printed(plan)

    def test_a_plan_without_regions_has_a_table_too(self) -> None:
        assert "Memory plan, level 1" in printed(Plan(regions=()))

    def test_a_plain_model_that_does_not_fit_is_said_to_do_so(self) -> None:
        plan = Plan(regions=(RegionPlan("0", "Linear", "recompute", "why"),), level=2, peak_bytes_after=2**20)
        assert "the plain model does not fit" in " ".join(printed(plan).split())

    def test_a_shared_module_is_shown_with_all_its_names(self) -> None:
        shared = SpikingBlock()
        model = nn.Sequential(shared, SpikingBlock(), shared)
        optimize_memory(model, SpikingBlock, loss_from_rest(spikes()))
        plan = applied_plan(model)
        assert plan is not None
        assert "= 2" in printed(plan)
