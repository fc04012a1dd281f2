"""Which modules become regions, and what the search says about its choice."""

from __future__ import annotations

import itertools

import norse.torch
import pytest
import sinabs.layers
import snntorch
import torch
from spikingjelly.activation_based import layer, neuron
from torch import nn

from lightning_memopt.observing.regions import with_surroundings
from lightning_memopt.planning import find_targets, is_multistep_neuron, is_neuron, split_into_children
from tests.planning_models import DeepSpikingBlock, SpikingBlock


def paths(model: nn.Module, targets: object = None) -> list[str]:
    return [region.path for region in find_targets(model, targets).regions]  # type: ignore[arg-type]


def linear_relu(*sizes: int) -> nn.Sequential:
    layers = [module for a, b in itertools.pairwise(sizes) for module in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers)


class Wrapper(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Stage(nn.Module):
    """A downsampling layer and blocks of one width."""

    def __init__(self, before: int, width: int, depth: int) -> None:
        super().__init__()
        self.down = nn.Linear(before, width)
        self.blocks = nn.ModuleList(DeepSpikingBlock(width) for _ in range(depth))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))


class TestWithoutTargets:
    def test_elements_of_a_module_list_are_the_regions_and_the_reason_counts_them(self) -> None:
        found = find_targets(Wrapper(stem=nn.Linear(4, 8), blocks=nn.ModuleList(SpikingBlock(8) for _ in range(3))))
        assert [region.path for region in found.regions] == ["blocks.0", "blocks.1", "blocks.2"]
        assert found.reason == "repeated blocks: 3 SpikingBlock"

    def test_blocks_are_found_inside_a_wrapper_with_a_single_child(self) -> None:
        model = Wrapper(network=nn.Sequential(SpikingBlock(), SpikingBlock()), loss=nn.CrossEntropyLoss())
        assert paths(model) == ["network.0", "network.1"]

    def test_plain_sequences_of_layers_are_blocks_where_their_classes_repeat(self) -> None:
        model = nn.Sequential(linear_relu(4, 8, 8), linear_relu(8, 8, 8), nn.Linear(8, 2))
        assert paths(model) == ["0", "1"]

    def test_layers_that_a_library_runs_over_time_and_their_neuron_are_a_block(self) -> None:
        def block(inputs: int) -> nn.Sequential:
            over_time = layer.SeqToANNContainer(nn.Conv2d(inputs, 8, 3), nn.BatchNorm2d(8))
            return nn.Sequential(over_time, neuron.LIFNode(step_mode="m"))

        model = Wrapper(blocks=nn.Sequential(block(3), block(8), block(8)), head=nn.Linear(8, 10))
        assert paths(model) == ["blocks.0", "blocks.1", "blocks.2"]

    def test_sequences_of_different_layers_are_no_repetition(self) -> None:
        features = nn.Sequential(nn.Conv2d(1, 4, 3), neuron.IFNode(), nn.Conv2d(4, 4, 3), neuron.IFNode())
        model = Wrapper(features=features, classifier=nn.Sequential(nn.Linear(4, 4), neuron.IFNode()))
        assert "features" not in paths(model)

    def test_blocks_inside_stages_of_plain_sequentials_are_found_although_each_stage_repeats(self) -> None:
        def stage(depth: int) -> nn.Sequential:
            return nn.Sequential(*(DeepSpikingBlock(8) for _ in range(depth)))

        model = Wrapper(layer1=stage(2), layer2=stage(1))
        assert paths(model) == ["layer1.0", "layer1.1", "layer2.0"]

    def test_stages_that_differ_in_width_are_looked_into(self) -> None:
        model = Wrapper(stages=nn.ModuleList([Stage(4, 8, 2), Stage(8, 16, 2)]))
        assert paths(model) == ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"]

    def test_equal_blocks_with_repetition_inside_stay_whole(self) -> None:
        model = nn.Sequential(MixtureBlock(), MixtureBlock())
        assert paths(model) == ["0", "1"]

    def test_different_blocks_that_hold_neurons_and_weights_are_taken(self) -> None:
        model = Wrapper(network=Wrapper(first=SpikingBlock(), second=DeepSpikingBlock()))
        found = find_targets(model)
        assert [region.path for region in found.regions] == ["network.first", "network.second"]
        assert "hold neurons and weights" in found.reason

    def test_in_a_flat_spiking_network_weight_layers_and_neurons_are_taken_but_no_norms(self) -> None:
        model = nn.Sequential(
            *(layer.Conv2d(1, 8, 3), layer.BatchNorm2d(8), neuron.LIFNode()),
            *(layer.Conv2d(8, 8, 3), layer.BatchNorm2d(8), neuron.LIFNode()),
        )
        found = find_targets(model)
        assert [region.path for region in found.regions] == ["0", "2", "3", "5"]
        assert "flat spiking network" in found.reason

    def test_neurons_with_weights_of_their_own_are_layers(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), neuron.ParametricLIFNode(), nn.Linear(4, 4), neuron.ParametricLIFNode())
        assert paths(model) == ["0", "1", "2", "3"]

    def test_small_repeated_blocks_beside_a_large_trunk_are_not_mistaken_for_the_model(self) -> None:
        trunk = [module for _ in range(6) for module in (nn.Linear(8, 8), neuron.IFNode())]
        model = Wrapper(trunk=nn.Sequential(*trunk), head1=SpikingBlock(8), head2=SpikingBlock(8))
        assert len(paths(model)) > 2

    def test_without_repetition_and_neurons_the_largest_children_are_taken(self) -> None:
        model = Wrapper(big=linear_relu(64, 64, 64, 64), tiny=linear_relu(2, 2), other=linear_relu(64, 64, 64))
        found = find_targets(model)
        assert [region.path for region in found.regions] == ["big", "other"]
        assert found.reason == "no repeated blocks and no neurons; the largest children: 2 Sequential"

    def test_a_single_block_with_a_neuron_is_not_said_to_have_none(self) -> None:
        found = find_targets(nn.Sequential(SpikingBlock(), nn.Conv1d(4, 4, 3)))
        assert [region.path for region in found.regions] == ["0"]
        assert found.reason == "no repeated blocks; the largest children: 1 SpikingBlock"

    def test_a_single_layer_has_no_regions_and_the_error_says_what_to_do(self) -> None:
        with pytest.raises(ValueError, match=r"Linear has no child modules.*Name the classes"):
            find_targets(nn.Linear(2, 2))

    def test_the_model_itself_is_never_a_region(self) -> None:
        for model in (SpikingBlock(), linear_relu(4, 4, 4), nn.Sequential(SpikingBlock())):
            assert "" not in paths(model)

    @pytest.mark.parametrize("depth", [2, 5])
    def test_regions_never_lie_inside_each_other(self, depth: int) -> None:
        model = nn.Transformer(16, 2, depth, depth, 32)
        found = find_targets(model).regions
        modules = {id(region.module) for region in found}
        assert len(found) == 2 * depth
        for region in found:
            inside = {id(module) for module in region.module.modules()} - {id(region.module)}
            assert not inside & modules


class TestWithTargets:
    def test_the_outermost_module_of_a_class_wins(self) -> None:
        outer = SpikingBlock(8)
        outer.inner = SpikingBlock(8)
        assert paths(nn.Sequential(outer, SpikingBlock(8)), SpikingBlock) == ["0", "1"]

    def test_subclasses_count_and_several_classes_may_be_given_in_any_sequence(self) -> None:
        class Special(SpikingBlock):
            pass

        model = nn.Sequential(Special(8), nn.Linear(8, 8), DeepSpikingBlock(8))
        assert paths(model, SpikingBlock) == ["0"]
        for targets in ([SpikingBlock, DeepSpikingBlock], (DeepSpikingBlock, SpikingBlock)):
            assert paths(model, targets) == ["0", "2"]

    def test_a_module_under_two_names_is_one_region_with_both_names(self) -> None:
        shared = SpikingBlock(8)
        found = find_targets(nn.Sequential(shared, SpikingBlock(8), shared), SpikingBlock)
        assert [(region.path, region.aliases) for region in found.regions] == [("0", ("2",)), ("1", ())]

    def test_a_module_that_also_lies_inside_another_region_is_left_to_it(self) -> None:
        shared = SpikingBlock(8)
        model = Wrapper(alone=shared, holder=Wrapper(inner=shared, weight=nn.Linear(8, 8)))
        assert paths(model, (SpikingBlock, Wrapper)) == ["holder"]

    def test_a_class_that_is_not_there_is_an_error_that_lists_what_is(self) -> None:
        with pytest.raises(ValueError, match=r"no module of class Conv2d.*Linear \(2\)"):
            find_targets(linear_relu(2, 2, 2), nn.Conv2d)

    def test_the_model_as_its_own_target_is_refused(self) -> None:
        with pytest.raises(ValueError, match="model as a whole cannot be a region"):
            find_targets(SpikingBlock(), SpikingBlock)

    @pytest.mark.parametrize("targets", ["SpikingBlock", 3, nn.Linear(2, 2), [nn.Linear, "x"], int])
    def test_anything_but_module_classes_is_a_type_error(self, targets: object) -> None:
        with pytest.raises(TypeError, match=r"targets must be a torch.nn.Module class"):
            find_targets(SpikingBlock(), targets)  # type: ignore[arg-type]

    def test_a_tensor_given_as_targets_is_not_printed(self) -> None:
        with pytest.raises(TypeError, match=r"found an instance of Tensor\.$"):
            find_targets(SpikingBlock(), torch.zeros(1000))  # type: ignore[arg-type]

    def test_an_empty_sequence_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="targets is empty"):
            find_targets(SpikingBlock(), ())


class TestNeurons:
    @pytest.mark.parametrize(
        "make",
        [
            neuron.IFNode,
            neuron.ParametricLIFNode,
            lambda: snntorch.Leaky(0.9, init_hidden=True),
            lambda: snntorch.RLeaky(0.9, linear_features=3),
            norse.torch.LIFCell,
            norse.torch.LIF,
            lambda: norse.torch.LIFRecurrentCell(2, 2),
            lambda: sinabs.layers.LIF(20.0),
            lambda: sinabs.layers.IAF(),
        ],
    )
    def test_neurons_of_every_library_are_known(self, make: object) -> None:
        assert is_neuron(make())  # type: ignore[operator]

    def test_other_modules_with_memory_are_no_neurons(self) -> None:
        assert not is_neuron(layer.Dropout())
        assert not is_neuron(nn.LSTM(2, 2))
        assert not is_neuron(sinabs.layers.SumPool2d(2))

    def test_only_multi_step_neurons_may_be_cut_along_time(self) -> None:
        assert is_multistep_neuron(neuron.IFNode(step_mode="m"))
        assert not is_multistep_neuron(neuron.IFNode(step_mode="s"))
        assert not is_multistep_neuron(snntorch.Leaky(0.9))
        assert not is_multistep_neuron(nn.Linear(2, 2))

    def test_finding_neurons_imports_no_neuron_library(self) -> None:
        import subprocess
        import sys

        code = (
            "import sys, torch; from lightning_memopt.planning import find_targets, is_neuron; "
            "find_targets(torch.nn.Transformer(8, 2, 2, 2, 8)); "
            "sys.exit(any(name in sys.modules for name in ('spikingjelly', 'snntorch', 'norse', 'sinabs')))"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_split_into_children_gives_the_children_and_nothing_for_one_or_a_neuron() -> None:
    block = DeepSpikingBlock(8)
    assert split_into_children(block) == tuple(block.children())
    assert split_into_children(nn.Sequential(nn.Linear(2, 2))) == ()
    assert split_into_children(neuron.IFNode()) == ()
    nested = nn.ModuleList([nn.Sequential(nn.Conv2d(1, 1, 1), SpikingBlock(8)), nn.Linear(2, 2)])
    assert [type(child).__name__ for child in split_into_children(nested)] == ["Conv2d", "SpikingBlock", "Linear"]


def test_searching_for_targets_runs_nothing_and_draws_no_random_numbers() -> None:
    model = nn.Sequential(SpikingBlock(), SpikingBlock())
    before = torch.get_rng_state()
    find_targets(model)
    assert torch.equal(before, torch.get_rng_state())


def test_what_lies_beside_the_regions_is_looked_at_largest_first_and_no_container_or_metric() -> None:
    import torchmetrics

    model = nn.ModuleDict({"stem": nn.Sequential(nn.Linear(4, 8), nn.ReLU()), "norm": nn.LayerNorm(8)})
    model["blocks"] = nn.ModuleList(nn.TransformerEncoderLayer(8, 2) for _ in range(3))
    model["heads"] = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 3)])
    model["accuracy"] = torchmetrics.Accuracy("multiclass", num_classes=3)
    found = find_targets(model)
    both = with_surroundings(model, found)
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert [region.path for region in both.regions] == ["stem", "norm", *blocks, "heads.0", "heads.1"]
    assert [region.path for region in both.regions if not region.outside] == blocks
    assert both.reason == found.reason
