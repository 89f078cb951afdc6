"""Parts of an architecture, for tests of single modules and kernels."""

from ostro.models.architecture import MLP, Part, Projection


def described_mlp(hidden: int, inner: int) -> MLP:
    return MLP(
        up=Projection(hidden, (Part("gate", inner), Part("up", inner))),
        down=Projection(inner, (Part("down", hidden),)),
        activation="silu",
        gated=True,
    )
