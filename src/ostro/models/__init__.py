"""What models are, as data: no torch, no numpy.

architecture    the description of a model
families        from config.json to that description, one file a family
registry        the table of families
"""
