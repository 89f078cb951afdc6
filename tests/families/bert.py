"""BERT: learned positions, types of tokens, norms after attention and MLP."""

from family_case import FamilyCase

CASE = FamilyCase(model_type="bert", config={"pad_token_id": 0})
