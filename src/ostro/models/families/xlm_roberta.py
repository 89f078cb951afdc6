"""XLM-RoBERTa: RoBERTa with a vocabulary of many languages."""

from dataclasses import replace

from ostro.models.families import roberta

FAMILY = replace(
    roberta.FAMILY,
    title="XLM-RoBERTa",
    model_type="xlm-roberta",
    architecture="XLMRobertaForSequenceClassification",
    bare="XLMRobertaModel",
    others=("XLMRobertaForMaskedLM",),
)
