"""A pre-norm decoder's layers with fused kernels: the same mathematics as the model's own `forward`, its plain twin.

    x ─┬─ norm ─ qkv ─ [head norms, rotation, store] ─ attention ─ o ─┐
       └──────────────────────── + ───────────────────────────────────┘ …then the gated MLP, likewise

For many rows, the matmuls are the library's, and the next norm's kernel adds their result to the residual stream. For
few rows, we use our own matmuls with the norm fused before and the residual sum after them: there, a kernel's launch
costs more than its work.

If results must not depend on the batch, all rows take the many-rows path, with matmuls and tilings that do not depend
on the number of rows.
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
        """`overlaps` lets a kernel prefetch its weights before the previous one has finished; `invariant` gives each
        row the same bits for any number of rows.
        """
        backbone = model.backbone
        assert isinstance(backbone.norm, RMSNorm)
        self._model = model
        self._embedding, self._norm = backbone.embed_tokens, backbone.norm
        self._layers = fused_layers(model)
        self._ropes = [rope for rope in backbone.ropes if isinstance(rope, Rotary)]
        self.overlaps = overlaps
        # On an H200 this gains 2 % at hidden size 1024 and loses 10 % at 4096, where the next kernel's weight reads
        # compete with attention's reads of keys.
        self._attends_ahead = overlaps and model.shape.hidden_size <= _NARROW
        self.invariant = invariant
        self.few = 0 if invariant else self._most_rows_that_pay()
        """Up to this many rows, our own matmuls are used."""

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
        """Hidden states of all tokens in the step, after the final norm. `adapted` rows take the many-rows path: the
        fused matmuls leave no place for the adapters' terms.
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
        # For a single row, our matmul is always faster than the library's.
        return max(paying, default=1)

    def logits(self, hidden: Tensor) -> Tensor:
        head = self._model.lm_head
        if self.invariant and head is not None:
            assert self._model.logit_softcap is None, "no fusible family caps its logits"
            return invariant_linear(hidden, head.weight, pdl=self.overlaps)
        if head is None or self._model.logit_softcap is not None or len(hidden) > self.few:
            return self._model.raw_logits(hidden)
        return self._model.whole_logits(small_linear(hidden, head.weight, pdl=self.overlaps))

    def _many_rows(
        self, layer: FusedLayer, x: Tensor, delta: Tensor | None, rotation: Tensor, slots: Tensor, ctx: StepAttention
    ) -> Tensor:
        """Returns the MLP's contribution to the residual stream; everything before it has already been added to x."""
        attention, mlp = layer.attention, layer.mlp
        qkv = self._linear(attention.qkv_proj, self._normed(x, delta, layer.attention_norm))
        attended = self._attend(attention, qkv, rotation, slots, ctx)
        normed = self._normed(x, self._linear(attention.o_proj, attended), layer.mlp_norm)
        gate_up = self._linear(mlp.gate_up_proj, normed)
        return self._linear(mlp.down_proj, gated(gate_up, layer.activation, pdl=self.overlaps))

    def _few_rows(self, layer: FusedLayer, x: Tensor, rotation: Tensor, slots: Tensor, ctx: StepAttention) -> None:
        """Adds the layer's output to the residual stream."""
        attention, mlp, pdl = layer.attention, layer.mlp, self.overlaps
        read, norm = self._read(x, layer.attention_norm)
        qkv = small_product(attention.qkv_proj, read, norm=norm, pdl=pdl)
        attended = self._attend(attention, qkv, rotation, slots, ctx)
        self._add_product(attention.o_proj, attended, x)
        read, norm = self._read(x, layer.mlp_norm)
        inner = small_product(mlp.gate_up_proj, read, norm=norm, activation=layer.activation, pdl=pdl)
        self._add_product(mlp.down_proj, inner, x)

    def _add_product(self, layer: Linear, read: Tensor, x: Tensor) -> None:
        """Adds a small-batch product to x: in its kernel, unless the ranks' results must be summed up first."""
        if layer.reduce is None:
            small_product(layer, read, residual=x, pdl=self.overlaps)
        else:
            x += layer.reduce(small_product(layer, read, pdl=self.overlaps))

    def _read(self, x: Tensor, norm: RMSNorm) -> tuple[Tensor, tuple[Tensor, float] | None]:
        """The input of a small-batch matmul, and the norm to fuse into it. Every program of the kernel recomputes a
        fused norm, which pays off for one row only.
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
        return y if layer.reduce is None else layer.reduce(y)

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
