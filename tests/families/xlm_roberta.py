"""XLM-RoBERTa: RoBERTa with a larger vocabulary."""

from family_case import FamilyCase

CASE = FamilyCase(model_type="xlm-roberta", config={"type_vocab_size": 1, "pad_token_id": 1})
