"""What models are, and the torch modules that run them.

architecture    what a model is, as data
families        from config.json to that data, one file a family
registry        the table of families
build           from that data to torch modules: `decoder`, made of `layers`
"""
