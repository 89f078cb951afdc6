"""A model on a GPU, or one rank's part of it, with its KV cache, page tables and graphs: carries out steps that were
planned elsewhere. Knows no sequences, and leaves sampling to the first rank.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ostro.backends.cuda.attention import AttentionWorkspace, StepAttention
from ostro.backends.cuda.choices import Gpu
from ostro.backends.cuda.compiling import Job, compile_kernels, launches
from ostro.backends.cuda.fused import FusedDecoder
from ostro.backends.cuda.graphs import StepGraphs
from ostro.backends.cuda.layer_plan import why_unfused
from ostro.backends.cuda.mixed_graphs import MixedGraphs
from ostro.backends.cuda.states import GpuStates
from ostro.backends.cuda.step_plan import Decode, Head, Mixed, Prelude, StepKind, Tokens
from ostro.backends.cuda.transfer import send
from ostro.errors import BadRequest
from ostro.kernels.gpu.state_rows import ChunkTables
from ostro.kernels.gpu.step_inputs import FIELDS, LENGTH, TOKEN, StepInputs, unpack
from ostro.torch_models.base import Model
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.lora import Adapters
from ostro.torch_models.shard import Collective


class GpuPart:
    def __init__(
        self,
        model: Model,
        *,
        page_size: int,
        num_pages: int,
        num_states: int = 0,
        max_batch_seqs: int,
        tokens: Tensor,
        captured: int,
        deterministic: bool = False,
        cascades: bool = False,
        kv_dtype: torch.dtype | None = None,
        adapters: Adapters | None = None,
        finish: Callable[[Tensor, Tensor, StepKind], None] | None = None,
        group: Collective | None = None,
        kernel_choices: str = "off",
        gpu: Gpu | None = None,
    ) -> None:
        """`tokens` are those that the latest step drew. Decode steps of up to `captured` rows are graphs; `finish` is
        called with their logits, the inputs and the kind on the first rank, which samples. Its tokens then go to the
        others of the `group`. Unless `captured` is 0, padded steps with prompts are graphs too. `kernel_choices` are as
        in `EngineConfig`. A `gpu` is what the part is made for if the model is on the meta device: it can then say what
        it would compile (`launches`), and run nothing.
        """
        parameter = next(model.parameters())
        self.model, self.device, self._adapters = model, parameter.device, adapters
        self.attention = AttentionWorkspace(
            model,
            num_pages=num_pages,
            page_size=page_size,
            max_batch_seqs=max_batch_seqs,
            kv_dtype=kv_dtype or parameter.dtype,
            deterministic=deterministic,
            cascades=cascades,
            gpu=gpu,
        )
        self.states = (
            GpuStates(model.states, num_states, dtype=parameter.dtype, device=self.device, exact=deterministic)
            if model.states
            else None
        )
        unfused = why_unfused(model)
        # None for models without a layer plan: their own `forward` runs on the same attention.
        self.decoder = (
            FusedDecoder(
                model,
                overlaps=self.attention.scratch.overlaps,
                invariant=deterministic,
            )
            if isinstance(model, Decoder) and unfused is None
            else None
        )
        if self.device.type == "cuda":
            # Joined weights have taken the place of their parts.
            torch.cuda.empty_cache()
        if unfused is not None and kernel_choices not in ("auto", "off"):
            raise BadRequest(
                f"kernel_choices is for models on the fused kernels, and this one is not: {unfused}. Leave it out.",
                param="kernel_choices",
            )
        # A graph's inputs and outputs.
        self.inputs = torch.zeros(FIELDS, max_batch_seqs, dtype=torch.int32, device=self.device)
        self._tokens, self._finish, self._group = tokens, finish, group
        self._hidden = torch.empty(0)
        if self.decoder is not None and self.device.type == "cuda" and not deterministic:
            compile_kernels(self.decoder, self.attention, kernel_choices)
        self.graphs = StepGraphs(self.decode_step, idle=self.idle, most=max_batch_seqs, captured=captured)
        self.mixed = MixedGraphs(
            model,
            self._forward,
            self.attention,
            self.states,
            tokens=tokens,
            max_batch_seqs=max_batch_seqs,
            captures=captured > 0,
        )

    def launches(self, kernel_choices: str, gpu: Gpu) -> list[Job]:
        """Calls that launch each kernel that is compiled ahead of its use; none if all are compiled on first use."""
        if self.decoder is None or self.decoder.invariant:
            return []
        return launches(self.decoder, self.attention, kernel_choices, gpu)

    def carry_out(self, message: object) -> None:
        """Carries out a message from the first rank."""
        match message:
            case Prelude():
                self.prepare(message)
            case Decode():
                self.graphs.get(message.size, message.kind)
                self.decode(message)
            case Mixed():
                self._hidden = self.forward(message)
            case Head(rows=rows):
                self.head(self._hidden[send(rows, self.device)])
            case Tokens(start=start, stop=stop):
                self.share_tokens(start, stop)

    def prepare(self, prelude: Prelude) -> None:
        self.attention.pages.copy(prelude.copies)
        if self.states is not None:
            self.states.copy(prelude.state_copies)
        if self._adapters is not None:
            self._adapters.begin(prelude.adapters)
        self.attention.tables.write(prelude.cells)
        if prelude.groups is not None:
            self.attention.groups.copy_(send(prelude.groups, self.device))

    def decode(self, step: Decode) -> None:
        """Runs a graph that `graphs.get` has made beforehand: capturing one overwrites the inputs."""
        run = self.graphs.get(step.size, step.kind)
        host = torch.from_numpy(step.inputs)
        self.inputs.copy_(host.pin_memory() if self.device.type == "cuda" else host, non_blocking=True)
        run()

    def forward(self, step: Mixed) -> Tensor:
        """The hidden states of all tokens; those of a graph are valid until the next such step."""
        if step.padding is not None:
            return self.mixed.run(step, step.padding)
        sent = send(step.inputs, self.device)
        inputs = unpack(sent, self._tokens)
        ctx = self.attention.of_tiles(
            step.rows, step.num_single, step.tiles, sent, inputs.slots, shares_prefixes=step.shares_prefixes
        )
        if self.states is not None:
            assert step.states is not None
            tables = ChunkTables(*(send(each, self.device) for each in (step.states.chunks, step.states.pieces)))
            ctx.states = self.states.of_step(inputs, sent[:, : step.num_single], tables)
        return self._forward(inputs, ctx, adapted=step.adapted)

    def head(self, hidden: Tensor) -> Tensor:
        return self.model.raw_logits(hidden) if self.decoder is None else self.decoder.logits(hidden)

    def idle(self) -> None:
        """Sets inputs that have no effect."""
        self.inputs.fill_(-1)
        self.inputs[TOKEN : LENGTH + 1] = 0

    @torch.inference_mode()
    def decode_step(self, size: int, kind: StepKind) -> None:
        """The step captured in a graph: reads `inputs` and the page tables."""
        sent = self.inputs[:, :size]
        inputs = unpack(sent, self._tokens)
        ctx = self.attention.of_single_tokens(sent, inputs.slots, shares_prefixes=kind.shares_prefixes)
        if self.states is not None:
            ctx.states = self.states.of_single_tokens(inputs, sent)
        logits = self.head(self._forward(inputs, ctx))
        if self._finish is not None:
            self._finish(logits, sent, kind)
        if kind.sampler is not None:
            self.share_tokens(0, size)

    def share_tokens(self, start: int, stop: int) -> None:
        """Sends the first rank's tokens to all ranks: the next step may read them."""
        if self._group is not None:
            self._group.broadcast(self._tokens[start:stop])

    def _forward(self, inputs: StepInputs, ctx: StepAttention, *, adapted: bool = False) -> Tensor:
        if self.decoder is not None:
            return self.decoder(inputs, ctx, adapted=adapted)
        return self.model(inputs.tokens, inputs.positions, ctx)
