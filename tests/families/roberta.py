"""RoBERTa: BERT without types of tokens, whose positions begin after that of padding."""

from family_case import FamilyCase

CASE = FamilyCase(model_type="roberta", config={"type_vocab_size": 1, "pad_token_id": 1})
