"""Descriptions of models as data, without torch or numpy.

architecture    a model's description
families        translate config.json into that description, one file per family
registry        the table of families
"""
