"""
A transformer in numbers
========================

:class:`Transformer` describes a decoder of the GPT or Llama kind. From it follow the shapes of all parameters
(:func:`parameter_shapes`) and the operations of a training step (:func:`training_tape`), each with the tensors that
autograd saves for it in eager PyTorch:

* a linear layer saves its input, once for all layers that read the same storage; autocast makes a copy per layer;
* LayerNorm saves its input and two numbers per token, RMSNorm its input and one number per token;
* GELU and SiLU save their input, ReLU its output; a product saves both factors;
* eager attention saves queries, keys, values and the output of the softmax, with dropout also a mask and the result:
  the raw scores are not saved. ``scaled_dot_product_attention`` saves queries, keys, values, its output and one number
  per row;
* dropout saves a mask of one byte per element on CUDA, noise in the dtype of its input on the CPU;
* cross-entropy saves the log-probabilities.

With dropout, 16 bits and eager attention this is ``34 d + 5 h T`` bytes per token and layer (Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", equation 1); their ``10 + 24 / t`` with tensor
parallelism (equation 2) follows likewise. Shapes of the GPT kind are those of Radford et al. 2019, of the Llama kind
those of Touvron et al. 2023.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from lightning_memopt.accounting.tape import Operation, Storage, Tape, Weight

__all__ = [
    "PRECISIONS",
    "Precision",
    "TRANSFORMERS",
    "Transformer",
    "parameter_count",
    "parameter_shapes",
    "precision_of",
    "training_tape",
]

Norm = Literal["layernorm", "rmsnorm", "rmsnorm-float32"]
Attention = Literal["sdpa", "eager"]
Activation = Literal["gelu", "silu", "relu"]
Positions = Literal["learned", "rotary"]


@dataclass(frozen=True)
class Precision:
    """What a ``Trainer(precision=...)`` means in bytes."""

    name: str
    parameter: int
    """Bytes of an element of parameters, gradients and optimizer state."""
    compute: int
    """Bytes of an element of what products read and write."""

    @property
    def autocast(self) -> bool:
        """Whether products run in 16 bits on weights of 32."""
        return self.compute != self.parameter


PRECISIONS: dict[str, Precision] = {
    name: Precision(name, parameter, compute)
    for name, parameter, compute in (
        ("64-true", 8, 8),
        ("32-true", 4, 4),
        ("16-mixed", 4, 2),
        ("bf16-mixed", 4, 2),
        ("16-true", 2, 2),
        ("bf16-true", 2, 2),
    )
}
"""Those of Lightning that run in torch alone."""

_ALIASES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def precision_of(name: str | int) -> Precision:
    """The precision that Lightning understands by ``name``.

    Raises:
        ValueError: Lightning does not know it, or it needs another library.

    Example:
        >>> precision_of("bf16").name, precision_of(32).name
        ('bf16-mixed', '32-true')
    """
    full = _ALIASES.get(str(name), str(name))
    if full not in PRECISIONS:
        raise ValueError(
            f"precision {name!r} cannot be estimated; accepted are {', '.join(map(repr, PRECISIONS))} and Lightning's "
            f"short forms {', '.join(map(repr, _ALIASES))}"
        )
    return PRECISIONS[full]


@dataclass(frozen=True)
class Transformer:
    """A decoder and the batch that it is trained on.

    Each block is ``x + attention(norm(x))``, then ``x + mlp(norm(x))``; a last norm and the output layer follow. With
    tensor parallelism the sizes stay those of the whole model.

    Raises:
        ValueError: a size is not positive, or sizes do not go together; the message says what is accepted.

    Example:
        >>> from lightning_memopt.accounting.transformer import TRANSFORMERS, parameter_count
        >>> parameter_count(TRANSFORMERS["llama-2-7b"])  # 2 V d + L (4 d^2 + 3 d d_ff + 2 d) + d
        6738415616
        >>> parameter_count(TRANSFORMERS["gpt2"])
        124439808
    """

    vocabulary: int
    """V, the rows of the embedding."""
    width: int
    """d, the size of the residual stream."""
    layers: int
    """L, the number of blocks."""
    heads: int
    """h, of queries; each is ``width / heads`` wide."""
    sequence_length: int = 2048
    """T, tokens of one sample; learned positions are as many."""
    batch_size: int = 1
    """B, samples on one device at a time."""
    feed_forward: int | None = None
    """Width inside the MLP; ``None``: four times ``width``."""
    kv_heads: int | None = None
    """Heads of keys and values; ``None``: ``heads``."""
    gated: bool = False
    """The MLP is ``down(activation(gate(x)) * up(x))``, as SwiGLU is."""
    activation: Activation = "gelu"
    tied: bool = True
    """The output layer uses the weights of the embedding."""
    bias: bool = True
    """Linear layers (but the output layer) and norms add a bias."""
    norm: Norm = "layernorm"
    """``rmsnorm`` is ``torch.nn.RMSNorm``; ``rmsnorm-float32`` that of Llama's own code, which computes in float32 by
    single operations and so stores more."""
    positions: Positions = "learned"
    attention: Attention = "sdpa"
    """``sdpa`` is ``scaled_dot_product_attention`` with a fused kernel (flash); ``eager`` multiplies the scores out."""
    fused_qkv: bool = False
    """Queries, keys and values come from one linear layer."""
    dropout: float = 0.0
    """Of the embedding, the attention's weights and both branches."""
    float32_loss: bool = True
    """Logits of 16 bits are cast to float32 before the loss, as most training code does."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in _SIZES:
                if value is None and entry.name in ("feed_forward", "kv_heads"):
                    continue
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise ValueError(f"{entry.name}={value!r} is not accepted: it is a whole number from 1 on")
            elif isinstance(entry.default, bool):
                if not isinstance(value, bool):
                    raise ValueError(f"{entry.name}={value!r} is not accepted; choose one of True, False")
            elif entry.name in _CHOICES and value not in _CHOICES[entry.name]:
                accepted = ", ".join(map(repr, _CHOICES[entry.name]))
                raise ValueError(f"{entry.name}={value!r} is not accepted; choose one of {accepted}")
        number = isinstance(self.dropout, (int, float)) and not isinstance(self.dropout, bool)
        if not number or not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout!r} is not accepted: it is a probability from 0 to below 1")
        if self.width % self.heads:
            near = [n for n in range(1, self.width + 1) if self.width % n == 0]
            raise ValueError(f"heads={self.heads} do not divide width={self.width}; accepted are {_listed(near)}")
        if self.heads % self.key_heads:
            near = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(f"kv_heads={self.kv_heads} do not divide heads={self.heads}; accepted are {_listed(near)}")
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(
                f"rotary positions turn pairs: width / heads = {self.head_width} is odd. Choose another number of "
                "heads, or positions='learned'"
            )

    @property
    def head_width(self) -> int:
        """Size of one head."""
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def key_width(self) -> int:
        """Size of all keys of a token, and of all its values."""
        return self.key_heads * self.head_width

    @property
    def inner_width(self) -> int:
        """Size inside the MLP."""
        return 4 * self.width if self.feed_forward is None else self.feed_forward

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.batch_size * self.sequence_length


_SIZES = (*("vocabulary", "width", "layers", "heads", "sequence_length", "batch_size", "feed_forward", "kv_heads"),)
_CHOICES: dict[str, tuple[str, ...]] = {
    "norm": get_args(Norm),
    "attention": get_args(Attention),
    "activation": get_args(Activation),
    "positions": get_args(Positions),
}


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _llama(
    vocabulary: int, width: int, layers: int, heads: int, inner: int, length: int, kv: int | None
) -> Transformer:
    return Transformer(
        vocabulary,
        width,
        layers,
        heads,
        sequence_length=length,
        feed_forward=inner,
        kv_heads=kv,
        gated=True,
        activation="silu",
        tied=False,
        bias=False,
        norm="rmsnorm-float32",
        positions="rotary",
    )


TRANSFORMERS: dict[str, Transformer] = {
    "gpt2": Transformer(50257, 768, 12, 12, sequence_length=1024, fused_qkv=True, dropout=0.1),
    "gpt2-medium": Transformer(50257, 1024, 24, 16, sequence_length=1024, fused_qkv=True, dropout=0.1),
    "gpt2-large": Transformer(50257, 1280, 36, 20, sequence_length=1024, fused_qkv=True, dropout=0.1),
    "gpt2-xl": Transformer(50257, 1600, 48, 25, sequence_length=1024, fused_qkv=True, dropout=0.1),
    "llama-2-7b": _llama(32000, 4096, 32, 32, 11008, 4096, None),
    "llama-2-13b": _llama(32000, 5120, 40, 40, 13824, 4096, None),
    "llama-2-70b": _llama(32000, 8192, 80, 64, 28672, 4096, 8),
    "llama-3-8b": _llama(128256, 4096, 32, 32, 14336, 8192, 8),
    "llama-3-70b": _llama(128256, 8192, 80, 64, 28672, 8192, 8),
}
"""Published models, one sample of their full length a batch."""


def parameter_shapes(model: Transformer, tensor_parallel: int = 1) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters by name; a tied output layer is the embedding.

    Args:
        model: the description.
        tensor_parallel: devices that share each matrix, as in Shoeybi et al. 2019 ("Megatron-LM"): queries, keys,
            values and the first matrices of the MLP by columns, the others by rows, the embedding by words.

    Example:
        >>> small = Transformer(vocabulary=100, width=8, layers=1, heads=2, sequence_length=16, bias=False)
        >>> parameter_shapes(small)["blocks.0.mlp.up"]
        (32, 8)
    """
    shapes: dict[str, tuple[int, ...]] = {}
    d, split = model.width, tensor_parallel

    def linear(name: str, rows: int, columns: int, *, by_rows: bool) -> None:
        shapes[name] = (rows // split, columns) if by_rows else (rows, columns // split)
        if model.bias:
            shapes[f"{name}.bias"] = (rows // split if by_rows else rows,)

    def norm(name: str) -> None:
        shapes[name] = (d,)
        if model.bias and model.norm == "layernorm":
            shapes[f"{name}.bias"] = (d,)

    shapes["embedding"] = (model.vocabulary // split, d)
    if model.positions == "learned":
        shapes["positions"] = (model.sequence_length, d)
    for number in range(model.layers):
        block = f"blocks.{number}"
        norm(f"{block}.norm1")
        if model.fused_qkv:
            linear(f"{block}.attention.qkv", d + 2 * model.key_width, d, by_rows=True)
        else:
            linear(f"{block}.attention.query", d, d, by_rows=True)
            linear(f"{block}.attention.key", model.key_width, d, by_rows=True)
            linear(f"{block}.attention.value", model.key_width, d, by_rows=True)
        linear(f"{block}.attention.output", d, d, by_rows=False)
        norm(f"{block}.norm2")
        if model.gated:
            linear(f"{block}.mlp.gate", model.inner_width, d, by_rows=True)
        linear(f"{block}.mlp.up", model.inner_width, d, by_rows=True)
        linear(f"{block}.mlp.down", d, model.inner_width, by_rows=False)
    norm("norm")
    if not model.tied:
        shapes["head"] = (model.vocabulary // split, d)
    return shapes


def parameter_count(model: Transformer) -> int:
    """Number of parameters, shared ones once."""
    return sum(map(math.prod, parameter_shapes(model).values()))


def buffer_bytes(model: Transformer, precision: Precision) -> int:
    """Bytes of the causal mask (eager attention, one for all blocks) and of the tables of rotary positions."""
    mask = model.sequence_length**2 if model.attention == "eager" else 0
    turns = 2 * model.sequence_length * model.head_width if model.positions == "rotary" else 0
    return mask + turns * precision.parameter


def input_bytes(model: Transformer) -> int:
    """Bytes of the tokens and of those to predict, 64 bits each."""
    return 2 * 8 * model.tokens


def training_tape(
    model: Transformer,
    precision: Precision,
    *,
    device: Literal["cuda", "cpu"] = "cuda",
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    cast_by_autocast: bool = True,
) -> Tape:
    """The operations of one forward pass and loss.

    Args:
        model: the description.
        precision: of the Trainer.
        device: what the kernels are those of; they save different tensors.
        tensor_parallel: devices that share the heads and the MLP.
        sequence_parallel: these share what lies between, too.
        cast_by_autocast: weights are cast by autocast; ``False`` where FSDP gathers them in 16 bits.

    Example:
        A model of 7 billion parameters, 4 samples of 2048 tokens. One attention matrix of one layer in 16 bits takes
        1.07 GB. With dropout, eager attention and the MLP of GPT, ``L B T (34 d + 5 h T)`` bytes are 122.4 GB; beyond
        that are only the numbers that norms keep. Without dropout the softmax's output is stored once.

        >>> from dataclasses import replace
        >>> 2 * 4 * 32 * 2048**2 / 1e9
        1.073741824
        >>> gpt = Transformer(32000, 4096, 32, 32, batch_size=4, attention="eager", dropout=0.1, fused_qkv=True)
        >>> def blocks(model, precision):
        ...     saved = training_tape(model, precision_of(precision)).saved_bytes()
        ...     return sum(size for module, size in saved.items() if module.startswith("blocks."))
        >>> 32 * 4 * 2048 * (34 * 4096 + 5 * 32 * 2048) / 1e9, blocks(gpt, "bf16-true") / 1e9
        (122.406567936, 122.41076224)
        >>> eager = replace(gpt, dropout=0.0)
        >>> (blocks(eager, "bf16-true") - blocks(replace(eager, attention="sdpa"), "bf16-true")) / 1e9  # 34.4 less rows
        34.326183936
        >>> llama = replace(TRANSFORMERS["llama-2-7b"], batch_size=4, sequence_length=2048)
        >>> [round(blocks(llama, precision) / 1e9) for precision in ("bf16-true", "bf16-mixed")]
        [49, 60]
    """
    return _Writer(model, precision, device, tensor_parallel, sequence_parallel, cast_by_autocast).write()


@dataclass(eq=False)
class _Tensor:
    """A tensor of the forward pass: its storage, elements and bytes per element."""

    storage: Storage
    elements: int
    element: int


class _Writer:
    """Writes the operations of each layer; the rules of the module's docstring, one method each."""

    def __init__(
        self, model: Transformer, precision: Precision, device: str, split: int, by_sequence: bool, autocast: bool
    ) -> None:
        self.model = model
        self.precision = precision
        self.cuda = device == "cuda"
        self.split = split
        self.tokens = model.tokens
        # What is not split by heads or columns. By sequence, a device stores its part and gathers the rest again.
        self.outer = model.tokens // split if by_sequence else model.tokens
        self.casts_weights = autocast and precision.autocast
        # A product's result of 16 bits, added to float32, is float32.
        self.residual = precision.parameter if autocast else precision.compute
        self.tape = Tape()

    def write(self) -> Tape:
        model, tape = self.model, self.tape
        x = self.embedding()
        for number in range(model.layers):
            start, given = len(tape.operations), x
            x = self.block(f"blocks.{number}", x)
            tape.stretches.append((start, len(tape.operations), given.storage))
        x = self.norm("norm", x)
        self.loss(x)
        return tape

    def embedding(self) -> _Tensor:
        model = self.model
        x = self.new(self.outer * model.width, self.residual)
        element = self.precision.parameter
        weight = Weight(model.vocabulary // self.split * model.width * element, shared=model.tied)
        self.tape.add(Operation("embedding", (), (x.storage,), weights=(weight,)))
        if model.positions == "learned":
            y = self.new(x.elements, self.residual)
            rows = model.sequence_length * model.width * element
            self.tape.add(Operation("embedding", (x.storage,), (y.storage,), weights=(Weight(rows),), hands_on=True))
            x = y
        return self.dropout("embedding", x)

    def block(self, path: str, x: _Tensor) -> _Tensor:
        x = self.add(path, x, self.attention(f"{path}.attention", self.norm(f"{path}.norm1", x)))
        return self.add(path, x, self.mlp(f"{path}.mlp", self.norm(f"{path}.norm2", x)))

    def attention(self, path: str, x: _Tensor) -> _Tensor:
        model = self.model
        inner, keys = self.tokens * model.width // self.split, self.tokens * model.key_width // self.split
        if model.fused_qkv:
            qkv = self.linear(path, x, inner + 2 * keys, model.width, model.width + 2 * model.key_width)
            q, k, v = (self.view(qkv, elements) for elements in (inner, keys, keys))
            self.tape.add(Operation(path, (qkv.storage,), (q.storage, k.storage, v.storage)))
        else:
            q = self.linear(path, x, inner, model.width, model.width)
            k = self.linear(path, x, keys, model.width, model.key_width)
            v = self.linear(path, x, keys, model.width, model.key_width)
        if model.positions == "rotary":
            q, k = self.rotated(path, q), self.rotated(path, k)
        y = (self.sdpa if model.attention == "sdpa" else self.eager)(path, q, k, v)
        y = self.linear(path, y, self.outer * model.width, model.width, model.width, by_columns=True)
        self.tape.hold(x.storage, q.storage, k.storage, v.storage)
        return self.dropout(path, y)

    def sdpa(self, path: str, q: _Tensor, k: _Tensor, v: _Tensor) -> _Tensor:
        q, k, v = (self.cast(path, part) for part in (q, k, v))
        y = self.new(q.elements, q.element)
        rows = Storage(max(4, q.element) * q.elements // self.model.head_width, needs_gradient=False)
        saves = (q.storage, k.storage, v.storage, y.storage, rows)
        reads = (q.storage, k.storage, v.storage)
        # The kernels of CUDA add up the gradient of the queries in float32.
        workspace = 4 * q.elements if self.cuda and q.element == 2 else 0
        self.tape.add(Operation(path, reads, (y.storage,), saves, backward_workspace=workspace))
        return y

    def eager(self, path: str, q: _Tensor, k: _Tensor, v: _Tensor) -> _Tensor:
        model = self.model
        # Heads come before tokens and keys are repeated for groups of queries: products read copies.
        q, k, v = (self.copy(path, self.cast(path, part), q.elements) for part in (q, k, v))
        scores = self.new(model.batch_size * model.heads // self.split * model.sequence_length**2, q.element)
        self.tape.add(Operation(path, (q.storage, k.storage), (scores.storage,), (q.storage, k.storage)))
        scaled = self.after(path, scores)
        masked = self.after(path, scaled)
        # Autocast takes the softmax in float32, on CUDA only.
        wide = 4 if self.precision.autocast and self.cuda else masked.element
        masked = self.cast(path, masked, wide)
        weights = self.new(masked.elements, wide)
        self.tape.add(Operation(path, (masked.storage,), (weights.storage,), (weights.storage,)))
        weights = self.dropout(path, weights, cheap=True)
        weights = self.cast(path, weights, cheap=model.dropout > 0)
        y = self.new(q.elements, q.element)
        self.tape.add(Operation(path, (weights.storage, v.storage), (y.storage,), (weights.storage, v.storage)))
        return self.copy(path, y, y.elements)

    def mlp(self, path: str, x: _Tensor) -> _Tensor:
        model = self.model
        elements = self.tokens * model.inner_width // self.split
        if model.gated:
            gate = self.linear(path, x, elements, model.width, model.inner_width)
            gate = self.activation(path, gate)
            up = self.linear(path, x, elements, model.width, model.inner_width)
            y = self.new(elements, up.element)
            self.tape.add(Operation(path, (gate.storage, up.storage), (y.storage,), (gate.storage, up.storage)))
        else:
            y = self.activation(path, self.linear(path, x, elements, model.width, model.inner_width))
        y = self.linear(path, y, self.outer * model.width, model.inner_width, model.width, by_columns=True)
        self.tape.hold(x.storage)
        return self.dropout(path, y)

    def loss(self, x: _Tensor) -> None:
        model = self.model
        words = model.vocabulary // self.split
        logits = self.linear("head", x, self.tokens * words, model.width, model.vocabulary, bias=False)
        wide = self.cast("loss", logits, max(4, logits.element)) if model.float32_loss else logits
        first = wide
        if self.precision.autocast and not model.float32_loss and not self.cuda:
            first = self.cast("loss", logits, 4)
        logs = self.new(first.elements, first.element)
        self.tape.add(Operation("loss", (first.storage,), (logs.storage,), (logs.storage,)))
        # The loss itself runs in float32 under autocast and saves what it reads.
        read = self.cast("loss", logs, 4) if self.precision.autocast else logs
        loss, weight = self.new(1, read.element), self.new(1, read.element)
        self.tape.add(Operation("loss", (read.storage,), (loss.storage,), (read.storage, weight.storage)))
        self.tape.hold(logits.storage, wide.storage, loss.storage)

    def linear(
        self,
        path: str,
        x: _Tensor,
        elements: int,
        columns: int,
        rows: int,
        *,
        by_columns: bool = False,
        bias: bool | None = None,
    ) -> _Tensor:
        x = self.cast(path, x)
        y = self.new(elements, self.compute)
        size = rows * columns // self.split
        copy = size * self.compute if self.casts_weights else 0
        weights = [Weight(size * self.precision.parameter, copy)]
        if self.model.bias if bias is None else bias:
            weights.append(Weight((rows if by_columns else rows // self.split) * self.precision.parameter))
        self.tape.add(Operation(path, (x.storage,), (y.storage,), (x.storage,), tuple(weights)))
        return y

    def norm(self, path: str, x: _Tensor) -> _Tensor:
        model, precision = self.model, self.precision
        tokens, given = x.elements // model.width, x.element
        weights: tuple[Weight, ...] = (Weight(model.width * precision.parameter),)
        extra: tuple[Storage, ...] = ()
        if precision.autocast and self.cuda and model.norm != "rmsnorm-float32":
            x = self.cast(path, x, 4, cheap=True)
            if not self.casts_weights:
                # Norms run in float32, on casts of the weights that were gathered in 16 bits.
                size = model.width * (2 if model.bias and model.norm == "layernorm" else 1)
                extra = (Storage(4 * size, needs_gradient=False),)

        def numbers(count: int, element: int) -> Storage:
            return Storage(count * tokens * element, needs_gradient=False)

        if model.norm == "layernorm":
            y = self.new(x.elements, x.element)
            if model.bias:
                weights *= 2
            statistics = numbers(2, max(4, x.element) if self.cuda else x.element)
            self.tape.add(
                Operation(path, (x.storage,), (y.storage,), (x.storage, statistics, *extra), weights, cheap=True)
            )
            return y
        wide = max(4, x.element)
        if model.norm == "rmsnorm" and self.cuda:
            y = self.new(x.elements, x.element)
            saves = (x.storage, numbers(1, wide), *extra)
            self.tape.add(Operation(path, (x.storage,), (y.storage,), saves, weights, cheap=True))
            return y
        # By single operations: x * rsqrt(mean(x^2) + eps), then * weight.
        x = self.cast(path, x, wide, cheap=True)
        normed = self.new(x.elements, wide)
        saves = (x.storage, numbers(1, wide))
        self.tape.add(
            Operation(path, (x.storage,), (normed.storage,), saves, cheap=True, backward_workspace=x.storage.bytes)
        )
        if model.norm == "rmsnorm-float32":
            normed = self.cast(path, normed, given, cheap=True)
        y = self.new(x.elements, normed.element)
        self.tape.add(Operation(path, (normed.storage,), (y.storage,), (normed.storage,), weights, cheap=True))
        return y if model.norm == "rmsnorm-float32" else self.cast(path, y, given, cheap=True)

    def activation(self, path: str, x: _Tensor) -> _Tensor:
        y = self.new(x.elements, x.element)
        saved = y if self.model.activation == "relu" else x
        self.tape.add(Operation(path, (x.storage,), (y.storage,), (saved.storage,), cheap=True))
        return y

    def dropout(self, path: str, x: _Tensor, *, cheap: bool = False) -> _Tensor:
        if not self.model.dropout:
            return x
        y = self.new(x.elements, x.element)
        size = x.elements * (1 if self.cuda else x.element)
        mask = Storage(size, needs_gradient=False, packed=-(-x.elements // 8))
        self.tape.add(Operation(path, (x.storage,), (y.storage,), (mask,), cheap=cheap))
        return y

    def rotated(self, path: str, x: _Tensor) -> _Tensor:
        """``x * cos + rotate_half(x) * sin``, which saves the tables alone: buffers, or casts of them."""
        y = self.new(x.elements, x.element)
        size = y.storage.bytes
        table = self.model.sequence_length * self.model.head_width * x.element
        tables = tuple(Storage(table, needs_gradient=False) for _ in range(2)) if self.casts_weights else ()
        self.tape.add(
            Operation(path, (x.storage,), (y.storage,), tables, forward_workspace=2 * size, backward_workspace=2 * size)
        )
        return y

    def add(self, path: str, x: _Tensor, y: _Tensor) -> _Tensor:
        total = self.new(x.elements, max(x.element, y.element))
        y = self.cast(path, y, total.element, forward=False)
        self.tape.add(Operation(path, (x.storage, y.storage), (total.storage,), hands_on=True))
        return total

    def after(self, path: str, x: _Tensor) -> _Tensor:
        """An elementwise operation that saves nothing."""
        y = self.new(x.elements, x.element)
        self.tape.add(Operation(path, (x.storage,), (y.storage,)))
        return y

    def copy(self, path: str, x: _Tensor, elements: int) -> _Tensor:
        y = self.new(elements, x.element)
        self.tape.add(Operation(path, (x.storage,), (y.storage,), hands_on=elements == x.elements))
        return y

    def cast(
        self, path: str, x: _Tensor, element: int | None = None, *, cheap: bool = False, forward: bool = True
    ) -> _Tensor:
        """Another dtype. ``forward=False``: an addition that reads both dtypes and only casts the gradient."""
        wanted = self.compute if element is None else element
        if x.element == wanted:
            return x
        y = self.new(x.elements, wanted) if forward else _Tensor(Storage(0), x.elements, wanted)
        self.tape.add(Operation(path, (x.storage,), (y.storage,), cheap=cheap))
        return y

    def view(self, x: _Tensor, elements: int) -> _Tensor:
        return _Tensor(Storage(elements * x.element, base=x.storage), elements, x.element)

    @staticmethod
    def new(elements: int, element: int) -> _Tensor:
        return _Tensor(Storage(elements * element), elements, element)

    @property
    def compute(self) -> int:
        return self.precision.compute
