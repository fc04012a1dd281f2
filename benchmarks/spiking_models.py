"""
Spiking benchmark models
^^^^^^^^^^^^^^^^^^^^^^^^

Imported by :mod:`models` once SpikingJelly is known to be there, because these networks are built from its layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from benchmark_case import Benchmark, Size
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from spikingjelly.activation_based.layer.attention import SpikingSelfAttention
from spikingjelly.activation_based.model.sew_resnet import BasicBlock, SEWResNet, sew_resnet34
from spikingjelly.activation_based.model.spikformer import (
    Spikformer,
    SpikformerBlock,
    SpikformerConv2dBNLIF,
    SpikformerMLP,
    spikformer_s,
)
from torch import Tensor, nn


def spiking_builders() -> dict[str, Callable[[Size], Benchmark]]:
    return {"block": _block, "vgg": _vgg, "sew_resnet34": _sew_resnet34, "spikformer": _spikformer}


def is_neuron(module: nn.Module) -> bool:
    """A multi-step neuron carries its state from step to step, so its sequence may be cut into chunks."""
    return isinstance(module, neuron.BaseNode)


class LinearIFBlock(nn.Module):
    """Linear-IF-Linear-IF on ``[T, N, C]``, the reference block of published figures."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(channels, channels)
        self.neuron1 = neuron.IFNode(step_mode="m")
        self.linear2 = nn.Linear(channels, channels)
        self.neuron2 = neuron.IFNode(step_mode="m")
        for linear in (self.linear1, self.linear2):
            # torch's default is too small for spikes: the third block would stay silent and prove nothing.
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron2(self.linear2(self.neuron1(self.linear1(x))))


def summed_spikes(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Number of output spikes; ``batch`` is ``(spikes [T, N, C],)``."""
    return model(batch[0]).sum()


def split_linear_if_block(module: nn.Module) -> tuple[nn.Module, ...]:
    if isinstance(module, LinearIFBlock):
        return (module.linear1, module.neuron1, module.linear2, module.neuron2)
    return ()


def is_neuron_or_linear(module: nn.Module) -> bool:
    return is_neuron(module) or isinstance(module, (nn.Linear, LinearIFBlock))


def _block(size: Size) -> Benchmark:
    steps, samples, channels = (4, 8, 16) if size == "tiny" else (16, 512, 512)
    model = nn.Sequential(*(LinearIFBlock(channels) for _ in range(3)))
    return Benchmark(
        name="block",
        description=f"3 x (Linear-IF-Linear-IF), T={steps}, N={samples}, C={channels}",
        model=model,
        batch=(torch.bernoulli(torch.full((steps, samples, channels), 0.2)),),
        loss=summed_spikes,
        targets=(LinearIFBlock,),
        split_fn=split_linear_if_block,
        can_chunk=is_neuron_or_linear,
        reset=functional.reset_net,
    )


def rate_cross_entropy(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Cross-entropy of the logits averaged over time; ``batch`` is ``(input, labels [N])``."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs).float().mean(0), labels)


class ConvNormLIF(nn.Module):
    """Convolution, batch norm and LIF neuron on ``[T, N, C, H, W]``, behind an optional average pool."""

    def __init__(self, channels_in: int, channels_out: int, *, pool: bool) -> None:
        super().__init__()
        projection: list[nn.Module] = [layer.AvgPool2d(2)] if pool else []
        projection += [
            layer.Conv2d(channels_in, channels_out, kernel_size=3, padding=1),
            layer.BatchNorm2d(channels_out),
        ]
        self.projection = nn.Sequential(*projection)
        self.neuron = neuron.LIFNode(
            tau=4 / 3,
            decay_input=False,
            detach_reset=True,
            surrogate_function=surrogate.ATan(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(self.projection(x))


class SpikingVGG(nn.Module):
    """Spiking VGG for CIFAR10-DVS: 64C3-128C3-AP2-256C3x2-AP2-512C3x2-AP2-512C3x2-AP2-FC (Deng et al. 2022).

    Input: event counts ``[T, N, 2, H, W]``; output: logits ``[T, N, 10]``. ``width`` is the channel count of the first
    layer, 64 in the paper.
    """

    def __init__(self, *, width: int, pixels: int) -> None:
        super().__init__()
        plan = [(1, False), (2, False), (4, True), (4, False), (8, True), (8, False), (8, True), (8, False)]
        blocks: list[nn.Module] = []
        channels = 2
        for multiple, pool in plan:
            blocks.append(ConvNormLIF(channels, multiple * width, pool=pool))
            channels = multiple * width
        self.features = nn.Sequential(*blocks, layer.AvgPool2d(2))
        self.dropout = layer.Dropout(0.25)
        self.head = layer.Linear(channels * (pixels // 16) ** 2, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        functional.set_step_mode(self, "m")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.features(x).flatten(2)))


def split_conv_norm_lif(module: nn.Module) -> tuple[nn.Module, ...]:
    if isinstance(module, ConvNormLIF):
        return (module.projection, module.neuron)
    return ()


def _vgg(size: Size) -> Benchmark:
    steps, samples, pixels, width = {
        "full": (10, 64, 48, 64),
        "small": (10, 4, 48, 16),
        "tiny": (2, 2, 16, 2),
    }[size]
    return Benchmark(
        name="vgg",
        description=f"Spiking VGG (CIFAR10-DVS), LIF, T={steps}, batch {samples}, {pixels}x{pixels}, width {width}",
        model=SpikingVGG(width=width, pixels=pixels),
        # Event counts are small integers, most of them zero: not binary, like the real data set.
        batch=(torch.poisson(torch.full((steps, samples, 2, pixels, pixels), 0.3)), torch.randint(10, (samples,))),
        loss=rate_cross_entropy,
        targets=(ConvNormLIF,),
        split_fn=split_conv_norm_lif,
        can_chunk=is_neuron,
        reset=functional.reset_net,
    )


class StaticImages(nn.Module):
    """Shows the same image at each of ``steps`` time steps: ``[N, C, H, W]`` in, ``[T, N, classes]`` out."""

    def __init__(self, network: nn.Module, steps: int) -> None:
        super().__init__()
        self.network = network
        self.steps = steps

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images.unsqueeze(0).repeat(self.steps, 1, 1, 1, 1))


def split_sew_block(module: nn.Module) -> tuple[nn.Module, ...]:
    if not isinstance(module, BasicBlock):
        return ()
    parts = [module.conv1, module.bn1, module.sn1, module.conv2, module.bn2, module.sn2]
    if module.downsample is not None:
        parts += [module.downsample, module.downsample_sn]
    return tuple(parts)


def is_neuron_or_conv(module: nn.Module) -> bool:
    return is_neuron(module) or isinstance(module, (nn.Conv1d, nn.Conv2d))


def _sew_resnet34(size: Size) -> Benchmark:
    steps, samples, pixels, classes = {
        "full": (4, 80, 224, 1000),
        "small": (4, 8, 64, 100),
        "tiny": (2, 2, 32, 10),
    }[size]
    options = {"cnf": "ADD", "spiking_neuron": neuron.IFNode, "num_classes": classes}
    options |= {"surrogate_function": surrogate.ATan(), "detach_reset": True}
    if size == "tiny":
        network, label = SEWResNet(BasicBlock, [1, 1, 1, 1], **options), "SEW-ResNet10"
    else:
        network, label = sew_resnet34(**options), "SEW-ResNet34"
    functional.set_step_mode(network, "m")
    return Benchmark(
        name="sew_resnet34",
        description=f"{label} (ADD), IF, T={steps}, batch {samples}, {pixels}x{pixels}",
        model=StaticImages(network, steps),
        batch=(torch.randn(samples, 3, pixels, pixels), torch.randint(classes, (samples,))),
        loss=rate_cross_entropy,
        targets=(BasicBlock,),
        split_fn=split_sew_block,
        can_chunk=is_neuron_or_conv,
        reset=functional.reset_net,
        full_precision="bf16",
    )


def split_spikformer(module: nn.Module) -> tuple[nn.Module, ...]:
    if isinstance(module, SpikformerConv2dBNLIF):
        return (module.conv_bn, module.neuron)
    if isinstance(module, SpikformerBlock):
        return (module.attn, module.mlp)
    if isinstance(module, SpikingSelfAttention):
        return (module.qkv_conv_bn, module.qkv_lif, module.attn_lif, module.proj_conv_bn, module.proj_lif)
    if isinstance(module, SpikformerMLP):
        return (module.fc1, module.neuron1, module.fc2, module.neuron2)
    return ()


def _spikformer(size: Size) -> Benchmark:
    if size == "full":
        steps, samples, pixels, classes = 4, 32, 224, 1000
        model: nn.Module = spikformer_s(T=steps, img_size_h=pixels, img_size_w=pixels, num_classes=classes)
        label = "Spikformer-S"
    else:
        small = size == "small"
        steps, samples, pixels, classes, width, depth = (4, 8, 32, 100, 128, 4) if small else (2, 2, 8, 10, 16, 2)
        model = Spikformer(
            T=steps,
            img_size_h=pixels,
            img_size_w=pixels,
            patch_size=4,
            num_classes=classes,
            embed_dims=width,
            num_heads=4,
            depths=depth,
        )
        label = f"Spikformer, width {width}, {depth} blocks, patch 4"
    return Benchmark(
        name="spikformer",
        description=f"{label}, LIF, T={steps}, batch {samples}, {pixels}x{pixels}",
        model=model,
        batch=(torch.randn(samples, 3, pixels, pixels), torch.randint(classes, (samples,))),
        loss=rate_cross_entropy,
        targets=(SpikformerConv2dBNLIF, SpikformerBlock),
        split_fn=split_spikformer,
        can_chunk=is_neuron_or_conv,
        reset=functional.reset_net,
        full_precision="bf16",
    )
