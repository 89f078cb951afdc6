"""A model's weights on a mesh, and the sizes of adapters and pages beside them. Knows no programs and no batch."""

from dataclasses import dataclass

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from ostro.backends.jax.adapters import Adapters, PlacedAdapters
from ostro.backends.jax.layout import check_adapters, jax_architecture, num_stateful, rank_state
from ostro.backends.jax.mesh import make_mesh
from ostro.backends.jax.pages import PagesShape
from ostro.backends.jax.shapes import Sizes
from ostro.backends.jax.states import StatesShape
from ostro.backends.jax.weights import Weights, load_weights
from ostro.models.architecture import Architecture, State
from ostro.models.cut import Cut, cut
from ostro.models.description import Description
from ostro.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class PlacedModel:
    described: Architecture
    cut: Cut
    mesh: Mesh
    weights: Weights
    dtype: npt.DTypeLike
    """The number format of matrices, keys and values."""
    adapters: PlacedAdapters | None = None

    @classmethod
    def load(
        cls,
        described: Description,
        checkpoint: Checkpoint,
        *,
        tensor_parallel: int = 1,
        platform: str | None = None,
        dtype: npt.DTypeLike = np.float32,
        adapters: Adapters | None = None,
    ) -> "PlacedModel":
        """Reads a model onto the first devices of a platform; None is JAX's default platform.

        Raises UnsupportedModel for a model that cannot run here, BadRequest for a `tensor_parallel` that does not fit.
        """
        model = jax_architecture(described)
        check_adapters(model, adapters or ())
        ranks, mesh = cut(model, tensor_parallel), make_mesh(tensor_parallel, platform)
        # Adapters first, so that those of another model fail at once.
        placed = PlacedAdapters.load(model, adapters, ranks, mesh, dtype) if adapters else None
        return cls(model, ranks, mesh, load_weights(model, checkpoint, ranks, mesh, dtype), dtype, placed)

    @property
    def platform(self) -> str:
        """The platform by Ostro's name: cpu, cuda or tpu."""
        name: str = self.mesh.devices.flat[0].platform
        return "cuda" if name == "gpu" else name

    @property
    def rank_bytes(self) -> int:
        """The size of weights and adapters on each device."""
        held = (self.weights, None if self.adapters is None else self.adapters.tables)
        return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(held))

    def pages_shape(self, sizes: Sizes) -> PagesShape:
        """The shape of all ranks' pages together."""
        shape, heads = self.described.shape, self.cut.kv_heads * self.cut.ranks
        layers = shape.num_layers - num_stateful(self.described)
        return PagesShape(layers, sizes.num_pages, heads, sizes.page_size, shape.head_dim)

    def states_shape(self, sizes: Sizes) -> StatesShape | None:
        """The shape of all ranks' states together; None for a model without any."""
        state, ranks = rank_state(self.described, self.cut), self.cut.ranks
        if state is None:
            return None
        latest, channels = state.inputs
        matrices = state.matrices
        if matrices is not None:
            heads, rows, columns = matrices
            matrices = ranks * heads, rows, columns
        whole = State((latest, ranks * channels), matrices)
        return StatesShape(num_stateful(self.described), sizes.num_states, whole)
