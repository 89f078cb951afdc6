"""A pre-norm decoder's layers by fused kernels: the same mathematics as the model's own `forward`, which is the twin.

    x ─┬─ norm ─ qkv ─ [head norms, rotation, store] ─ attention ─ o ─┐
       └──────────────────────── + ───────────────────────────────────┘ …then the gated MLP, alike

Of many rows, the products are the library's, and what one gives is added to the stream by the next norm's kernel. Of a
few, the products are our own, with the norm before them and the sum after them folded in: there each kernel costs more
by being one than by what it does.

Where results must not depend on the batch, all rows go the way of many, by products and cuts that their number does not
change.
"""

from torch import Tensor

from ostro.kernels.gpu.decode_attention import DecodeScratch
from ostro.kernels.gpu.fp8 import MOST_FEW
from ostro.kernels.gpu.invariant_linear import invariant_linear
from ostro.kernels.gpu.mlp import gated
from ostro.kernels.gpu.norm import add_rms_norm
from ostro.kernels.gpu.rope_store import rope_store, rotation_table
from ostro.kernels.gpu.small_batch import ROWS, measured, small_linear
from ostro.kernels.gpu.step_inputs import StepInputs
from ostro.runner.gpu.attention import StepAttention
from ostro.runner.gpu.compiling import compile_kernels
from ostro.runner.gpu.layers import FusedLayer, fused_layers
from ostro.runner.gpu.projections import Fp8Linear, product, small_product
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.layers import Attention, HeadNorm, Linear, Matrix, RMSNorm
from ostro.torch_models.rope import Rotary

_NARROW = 2048


class FusedDecoder:
    def __init__(self, model: Decoder, *, overlaps: bool, invariant: bool = False) -> None:
        """`overlaps` lets a kernel begin to fetch its weights before the one before it has ended; `invariant` gives
        each row the same bits whatever the number of rows.
        """
        backbone = model.backbone
        assert isinstance(backbone.norm, RMSNorm)
        self._model = model
        self._embedding, self._norm = backbone.embed_tokens, backbone.norm
        self._layers = fused_layers(model)
        self._ropes = [rope for rope in backbone.ropes if isinstance(rope, Rotary)]
        self.overlaps = overlaps
        # On an H200 this gives a model of width 1024 2 %, and takes 10 % from one of 4096: there what follows would
        # read its weights while attention reads keys.
        self._attends_ahead = overlaps and model.shape.hidden_size <= _NARROW
        self.invariant = invariant
        self.few = 0 if invariant else self._most_rows_that_pay()
        """Up to how many rows the products are our own."""

    def compile(self, scratch: DecodeScratch) -> None:
        compile_kernels(
            self._model,
            self._layers[0],
            scratch,
            overlaps=self.overlaps,
            attends_ahead=self._attends_ahead,
            few=self.few,
        )

    def __call__(self, inputs: StepInputs, ctx: StepAttention, *, adapted: bool = False) -> Tensor:
        """Hidden states of all tokens of the step, after the final norm. `adapted` rows go the way of many: there is no
        place between the folded products for what adapters add.
        """
        x = self._embedding(inputs.tokens)
        rotations = [
            rotation_table(
                inputs.positions,
                rope.frequencies[len(rope.frequencies) // 2 :],
                rope.attention_factor,
                invariant=self.invariant,
            )
            for rope in self._ropes
        ]
        delta: Tensor | None = None
        for layer in self._layers:
            if len(x) <= self.few and not adapted:
                self._few_rows(layer, x, rotations[layer.rope], inputs.slots, ctx)
            else:
                delta = self._many_rows(layer, x, delta, rotations[layer.rope], inputs.slots, ctx)
        return self._normed(x, delta, self._norm)

    def _most_rows_that_pay(self) -> int:
        first = self._layers[0]
        if isinstance(first.mlp.down_proj, Fp8Linear):
            return MOST_FEW
        parts = (first.attention, first.mlp)
        matrices = [each.weight for part in parts for each in part.modules() if isinstance(each, Matrix)]
        paying = [most for most in ROWS if all(measured(most, *weight.shape) for weight in matrices)]
        # Of one row the product is always faster than the library's.
        return max(paying, default=1)

    def logits(self, hidden: Tensor) -> Tensor:
        head = self._model.lm_head
        if self.invariant and head is not None:
            assert self._model.logit_softcap is None, "no fusible family caps its logits"
            return invariant_linear(hidden, head.weight, pdl=self.overlaps)
        if head is None or self._model.logit_softcap is not None or len(hidden) > self.few:
            return self._model.raw_logits(hidden)
        return small_linear(hidden, head.weight, pdl=self.overlaps)

    def _many_rows(
        self, layer: FusedLayer, x: Tensor, delta: Tensor | None, rotation: Tensor, slots: Tensor, ctx: StepAttention
    ) -> Tensor:
        """What the layer's MLP adds to the stream; what came before it, its attention's part too, is in x by then."""
        attention, mlp = layer.attention, layer.mlp
        qkv = self._linear(attention.qkv_proj, self._normed(x, delta, layer.attention_norm))
        attended = self._attend(attention, qkv, rotation, slots, ctx)
        normed = self._normed(x, self._linear(attention.o_proj, attended), layer.mlp_norm)
        gate_up = self._linear(mlp.gate_up_proj, normed)
        return self._linear(mlp.down_proj, gated(gate_up, layer.activation, pdl=self.overlaps))

    def _few_rows(self, layer: FusedLayer, x: Tensor, rotation: Tensor, slots: Tensor, ctx: StepAttention) -> None:
        """Adds what the layer gives to the stream."""
        attention, mlp, pdl = layer.attention, layer.mlp, self.overlaps
        read, norm = self._read(x, layer.attention_norm)
        qkv = small_product(attention.qkv_proj, read, norm=norm, pdl=pdl)
        attended = self._attend(attention, qkv, rotation, slots, ctx)
        small_product(attention.o_proj, attended, residual=x, pdl=pdl)
        read, norm = self._read(x, layer.mlp_norm)
        inner = small_product(mlp.gate_up_proj, read, norm=norm, activation=layer.activation, pdl=pdl)
        small_product(mlp.down_proj, inner, residual=x, pdl=pdl)

    def _read(self, x: Tensor, norm: RMSNorm) -> tuple[Tensor, tuple[Tensor, float] | None]:
        """What a product of few rows reads, and the norm that it is to do itself: done over for each of its programs,
        which pays for one row only.
        """
        if len(x) == 1:
            return x, (norm.weight, norm.eps)
        return self._normed(x, None, norm), None

    def _normed(self, x: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        return add_rms_norm(x, delta, norm.weight, norm.eps, invariant=self.invariant, pdl=self.overlaps)

    def _linear(self, layer: Linear, x: Tensor) -> Tensor:
        if self.invariant:
            return invariant_linear(x, layer.weight, layer.bias, pdl=self.overlaps)
        y = product(layer, x, pdl=self.overlaps)
        if layer.adapt is not None:
            layer.adapt(x, y)
        return y

    def _attend(
        self,
        attention: Attention,
        qkv: Tensor,
        rotation: Tensor,
        slots: Tensor,
        ctx: StepAttention,
    ) -> Tensor:
        keys, values = ctx.pages.layers[attention.layer]
        norm = attention.qk_norm
        assert isinstance(norm, HeadNorm | None)
        weight = None if norm is None else (norm.weight, norm.eps)
        q = rope_store(qkv, rotation, slots, keys, values, norm=weight, invariant=self.invariant, pdl=self.overlaps)
        return ctx.attend_stored(attention.layer, q, attention.spec, pdl=self._attends_ahead)
