"""OLMoE: experts, and norms over all heads of queries and of keys together."""

from family_case import EXPERTS, GGUF_DECODER, GGUF_EXPERTS, FamilyCase, GgufCase

CASE = FamilyCase(
    model_type="olmoe",
    config=EXPERTS,
    variants={"normalized": {"norm_topk_prob": True, "attention_bias": True}},
    spelling={"head_dim": None},
    mixture=True,
    gguf={"": GgufCase(config={**EXPERTS, "tie_word_embeddings": False}, metadata={**GGUF_DECODER, **GGUF_EXPERTS})},
)
