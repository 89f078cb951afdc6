"""How a conversation samples from a model whose files recommend nothing, as most GGUF files: the API's default is
temperature 1, at which small models ramble. The playground does the same (`static/params.js`).
"""

from collections.abc import Mapping

from ostro.client.options import ChatOptions

OWN = ChatOptions(temperature=0.6, top_p=0.95)
_RECOMMENDABLE = ("temperature", "top_p", "top_k", "min_p")


def own_sampling(recommended: Mapping[str, object] | None, given: ChatOptions) -> ChatOptions:
    """What to send besides the given options. `recommended` are the model's defaults, None while they are not known.

    Empty if the model recommends a sampling, or if the user chose one.
    """
    if recommended is None or any(name in recommended or name in given for name in _RECOMMENDABLE):
        return ChatOptions()
    return OWN


NOTE = (
    f"The model recommends no sampling: temperature {OWN['temperature']} and top_p {OWN['top_p']} are used. "
    "--temperature and --top-p set others."
)
